"""Options of this algorithm. The option groups that all RL recipes share are in training/options/rl_options.py.

`a.b=value` and `--a.b value` are equivalent. `--config FILE` reads YAML. `--help all` describes every option.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from components.ranges import Count, NotNegative, ShareAboveZero
from training.options.rl_options import PolicyOptions, RLOptions, without_effect
from training.options.schema import active_when, of_plugin


@dataclass(kw_only=True)
class AlgorithmOptions(PolicyOptions):
    """Advantages, policy loss, KL penalty and dynamic sampling."""

    std_norm: bool = True
    """Divide the advantages of a prompt's responses by their standard deviation. Dr. GRPO sets it to false."""
    std_epsilon: float = active_when(1e-4, std_norm=True)
    """Constant added to the standard deviation of std_norm, so that rewards that differ only by rounding give
    advantages near 0."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance-sampling ratio that is clipped. `token`: the ratio of each token; `sequence`: the geometric mean over
    the response (GSPO). gspo.yaml also sets GSPO's aggregation and its much smaller clip range."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """Aggregation of the token losses. `token-mean` weights all tokens equally (DAPO), `seq-mean-token-mean` all
    responses equally (the first GRPO). `seq-mean-token-sum` sums over each response, and `seq-mean-token-sum-norm`
    divides this sum by rollout.max_new_tokens (Dr. GRPO)."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the reference model in the loss. It is aggregated over tokens like the policy loss. With 0 no
    reference role is started."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = "k3"
    """Estimator of the KL. A `+`, as in `k3+`, keeps the value of the estimator and takes the gradient of k2, which is
    unbiased."""
    reference_sync_steps: Count | None = active_when(None, kl_coef=True)
    """Number of steps between two updates of the reference model towards the policy (TR-DPO). Default: the reference
    model stays at its starting weights."""
    reference_mixup: ShareAboveZero = active_when(0.6, reference_sync_steps=True)
    """Weight of the policy in an update of the reference model (reference_sync_steps). 1 copies the policy. A smaller
    value gives a moving average."""
    filter_range: tuple[float, float] | None = of_plugin("dynamic_sampling", None)
    """Dynamic sampling: lowest and highest mean score of a prompt's responses, both excluded. Prompts outside of the
    range are replaced until the step is full or the data ends. Default: every prompt is trained on."""
    overlong_buffer: int | None = None
    """Number of tokens before rollout.max_new_tokens over which a response loses reward (DAPO). Default: no penalty."""
    overlong_penalty: NotNegative = 1.0
    """Penalty on a response of maximum length. Within the buffer it grows linearly."""


@dataclass(kw_only=True)
class GRPOConfig(RLOptions):
    """Group relative policy optimization."""

    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        algorithm = self.algorithm
        max_length = self.rollout.max_new_tokens
        if self.samples_per_prompt < 2:
            yield f"samples_per_prompt={self.samples_per_prompt}: GRPO compares responses to one prompt; set 2 or more"
        if algorithm.reference_sync_steps and self.is_own_reference:
            yield (
                "algorithm.reference_sync_steps updates a separate reference model, but with train.lora_rank the "
                "reference is the policy without its adapters; unset one of them"
            )
        if algorithm.filter_range and not algorithm.filter_range[0] < algorithm.filter_range[1]:
            yield f"algorithm.filter_range={algorithm.filter_range}; set two scores, the lower first"
        if algorithm.overlong_buffer is None:
            return
        if self.agent.func_path:
            yield (
                "algorithm.overlong_buffer applies to single responses, but agent.func_path runs episodes of several; "
                "unset one of them"
            )
        if not 1 <= algorithm.overlong_buffer <= max_length:
            yield f"algorithm.overlong_buffer={algorithm.overlong_buffer}; set 1 to rollout.max_new_tokens={max_length}"

    def syncs_reference(self, step: int) -> bool:
        """Return True if the reference model is updated after this step."""
        every = self.algorithm.reference_sync_steps
        return self.has_reference_role and every is not None and step % every == 0

    def optimizer_steps(self, count: int) -> int:
        """Return the number of optimizer steps for `count` responses, at least 1.

        With dynamic sampling the last step may hold fewer responses. It then gets fewer optimizer steps of the usual
        size: the usual number of small ones would change the policy as much with far less data.
        """
        return max(round(count / self.mini_batch_size), 1)

    def notes(self, set_options: Collection[str]) -> list[str]:
        """Return the notes that are printed before the run starts.

        Args:
            set_options: names of the options that the user has set. Only these are reported as having no effect.
        """
        algorithm = self.algorithm
        idle = [
            (algorithm.overlong_buffer is None, "algorithm.overlong_penalty", "algorithm.overlong_buffer is not set")
        ]
        notes = without_effect(idle, set_options) + super().notes(set_options)
        if algorithm.filter_range and self.train.lr_scheduler != "constant":
            notes.append(
                "the learning-rate schedule covers the maximum number of steps; dynamic sampling uses up the prompts "
                "earlier, so that the run ends before the schedule does"
            )
        return notes

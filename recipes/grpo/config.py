"""The options of this algorithm, beside the groups that all recipes share; `--help all` describes them.

`a.b=value` and `--a.b value` mean the same; `--config FILE` reads YAML.
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
    """Divide the advantages of a prompt's responses by their standard deviation. Dr. GRPO does not."""
    std_epsilon: float = active_when(1e-4, std_norm=True)
    """Added to that deviation, so that rewards which differ by rounding alone teach next to nothing."""
    ratio: Literal["token", "sequence"] = "token"
    """Whose importance-sampling ratio is clipped: each token's, or the geometric mean over the response (GSPO, whose
    aggregation and much smaller clip range are in gspo.yaml)."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How tokens are weighed: each the same (DAPO), each response the same (the first GRPO), or each response's sum,
    divided by rollout.max_new_tokens with -norm (Dr. GRPO)."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the reference model in the loss, aggregated as the loss is. 0: no reference role is
    started."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = "k3"
    """Which estimator of the KL; with a + its gradient is that of k2, the unbiased one."""
    reference_sync_steps: Count | None = active_when(None, kl_coef=True)
    """After every so many steps the reference model moves towards the policy (TR-DPO). Default: it stays what it was at
    the start."""
    reference_mixup: ShareAboveZero = active_when(0.6, reference_sync_steps=True)
    """How far: 1 is the policy itself, less a moving average."""
    filter_range: tuple[float, float] | None = of_plugin("dynamic_sampling", None)
    """Dynamic sampling: prompts whose responses' mean score is not between the two, the bounds excluded, are replaced
    until the step is full or the data at its end. Default: every prompt is trained on."""
    overlong_buffer: int | None = None
    """Responses lose reward over the last so many tokens before rollout.max_new_tokens (DAPO). Default: they do not."""
    overlong_penalty: NotNegative = 1.0
    """How much a response of full length loses."""


@dataclass(kw_only=True)
class GRPOConfig(RLOptions):
    """Group relative policy optimisation."""

    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        own = self.algorithm
        if self.samples_per_prompt < 2:
            yield f"samples_per_prompt={self.samples_per_prompt}: GRPO compares responses to one prompt; set 2 or more"
        if own.reference_sync_steps and self.is_own_reference:
            yield (
                "algorithm.reference_sync_steps moves a reference model, and with train.lora_rank it is the policy "
                "without its adapters; unset one of them"
            )
        if own.filter_range and not own.filter_range[0] < own.filter_range[1]:
            yield f"algorithm.filter_range={own.filter_range}; set two scores, the lower first"
        longest = self.rollout.max_new_tokens
        if own.overlong_buffer is not None and self.agent.func_path:
            yield (
                "algorithm.overlong_buffer is about one response, and agent.func_path runs episodes of several; unset "
                "one of them"
            )
        if own.overlong_buffer is not None and not 1 <= own.overlong_buffer <= longest:
            yield f"algorithm.overlong_buffer={own.overlong_buffer}; set 1 to rollout.max_new_tokens={longest}"

    def syncs_reference(self, step: int) -> bool:
        """Whether the reference model moves after this step."""
        every = self.algorithm.reference_sync_steps
        return self.has_reference_role and every is not None and step % every == 0

    def optimizer_steps(self, count: int) -> int:
        """All of the same size, but at the end of filtered data, where a step of a few responses would move as far."""
        return max(round(count / self.mini_batch_size), 1)

    def notes(self, given: Collection[str]) -> list[str]:
        """What a user who has named the options `given` should know of before the run starts."""
        own = self.algorithm
        idle = [(own.overlong_buffer is None, "algorithm.overlong_penalty", "algorithm.overlong_buffer is not set")]
        found = without_effect(idle, given) + super().notes(given)
        if own.filter_range and self.train.lr_scheduler != "constant":
            found.append(
                "the schedule of the learning rate is that of the most steps that there can be; filtering ends "
                "the run before it"
            )
        return found

"""Options of this algorithm. The option groups that all RL recipes share are in training/options/rl_options.py.

`a.b=value` and `--a.b value` are equivalent. `--config FILE` reads YAML. `--help all` describes every option.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from components.models.sources import check_model_source
from components.ranges import Count, NotNegative, Share
from training.options.rl_options import PolicyOptions, RLOptions
from training.options.schema import Options, at_home, errors_of


@dataclass(kw_only=True)
class AlgorithmOptions(PolicyOptions):
    """Loss that moves the student towards the teacher, and the weight of the reward."""

    loss: Literal["policy_gradient", "divergence", "k1"] = "policy_gradient"
    """`policy_gradient`: the advantage of a sampled token is its log-probability under the teacher minus that under the
    student, which gives the gradient of the reverse KL in expectation. `divergence`: the gradient of
    algorithm.divergence, summed over the teacher's top_k tokens. `k1` is rejected: its expected gradient is 0."""
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """Divergence that loss=divergence minimises. `reverse`: KL(student, teacher); `forward`: KL(teacher, student);
    `jsd`: the generalised Jensen-Shannon divergence with jsd_beta."""
    top_k: int = 0
    """Number of the teacher's most likely tokens at each position that the teacher sends. All other tokens together are
    one further class. With all tokens but one the divergence is exact. Each listed token takes 8 bytes per token of a
    response. With loss=policy_gradient a value above 0 subtracts the KL of the position as a baseline, which reduces
    the variance. 0 sends only the log-probability of the sampled token."""
    jsd_beta: Share = 0.5
    """Weight of the teacher in the mixture of divergence=jsd. Near 0 it acts like `forward`, near 1 like `reverse`."""
    reward_coef: NotNegative = 0.0
    """Weight of the reward beside the teacher: the advantage of a response relative to the other responses to its
    prompt is added to each of its tokens. 0 trains on the teacher alone, and the reward is only logged."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.loss == "k1":
            yield (
                "algorithm.loss=k1: the derivative of log p - log q does not contain the teacher q, and its mean over "
                "the student's samples is 0; set policy_gradient, which has the gradient of the reverse KL"
            )
        if self.top_k < 0:
            yield f"algorithm.top_k={self.top_k}; set a number of tokens, or 0"
        if self.loss == "divergence" and self.top_k < 1:
            yield "algorithm.loss=divergence sums over the teacher's likeliest tokens; set algorithm.top_k, such as 32"
        if self.loss == "divergence" and self.reward_coef:
            yield "algorithm.reward_coef needs advantages, which loss=divergence has none of; set loss=policy_gradient"
        if self.divergence == "jsd" and not 0 < self.jsd_beta < 1:
            yield f"algorithm.jsd_beta={self.jsd_beta}; set a weight between 0 and 1, both excluded"
        if self.kl_coef:
            yield f"algorithm.kl_coef={self.kl_coef}: the teacher takes the place of a reference model; leave it at 0"


@dataclass(kw_only=True)
class TeacherOptions(Options, group="teacher"):
    """The model that the student learns from."""

    path: str = ""
    """Local folder or hub name of the teacher, or `expert:<task>`, a tiny demonstration model trained on correct
    responses. It must have the tokenizer of the student. placement.references and placement.frozen_models place it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = at_home(self.path)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from errors_of(f"teacher.path={self.path}: ", check_model_source, self.path)


@dataclass(kw_only=True)
class DistillConfig(RLOptions):
    """On-policy distillation from a teacher with the same tokenizer."""

    KL_IN_REWARD: ClassVar[bool] = True

    prompts_per_step: Count = 64
    """Number of prompts per training step."""
    samples_per_prompt: Count = 2
    """Number of responses sampled per prompt. algorithm.reward_coef needs at least 2."""
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    teacher: TeacherOptions = field(default_factory=TeacherOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if not self.teacher.path:
            yield "teacher.path is empty; set the model that the student learns from"
        if self.algorithm.reward_coef and self.samples_per_prompt < 2:
            yield (
                f"algorithm.reward_coef compares the responses to one prompt, but samples_per_prompt="
                f"{self.samples_per_prompt}; set it to 2 or more"
            )
        if self.algorithm.top_k and self.parallel.tensor > 1:
            yield "algorithm.top_k reads whole rows of logits, which parallel.tensor splits; unset one of them"

    @property
    def has_baseline(self) -> bool:
        """True if the KL of each position is subtracted as a baseline, for which the student is evaluated once more."""
        return self.algorithm.loss == "policy_gradient" and self.algorithm.top_k > 0

    @property
    def needs_reference(self) -> bool:
        """See `RLOptions.needs_reference`. The teacher takes the place of the reference model."""
        return True

    @property
    def is_own_reference(self) -> bool:
        """See `RLOptions.is_own_reference`."""
        return False

    @property
    def starts_as_reference(self) -> bool:
        """See `RLOptions.starts_as_reference`."""
        return False

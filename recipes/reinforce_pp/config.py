"""The options of this algorithm, beside the groups that all recipes share; `--help all` describes them.

`a.b=value` and `--a.b value` mean the same; `--config FILE` reads YAML.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from components.ranges import Count, NotNegative, Share
from training.options.rl_options import PolicyOptions, RLOptions


@dataclass(kw_only=True)
class AlgorithmOptions(PolicyOptions):
    """The baseline of a response's reward, and how far one step may go."""

    baseline: Literal["none", "group_mean", "leave_one_out"] = "none"
    """What is subtracted from a response's reward: nothing (REINFORCE++), the mean of all responses to its prompt
    (REINFORCE++-baseline), or the mean of the others (RLOO)."""
    whiten: bool = True
    """Shift and scale the advantages of all tokens of a step to mean 0 and standard deviation 1. RLOO does not."""
    gamma: Share = 1.0
    """Discount per token of the response."""
    kl_coef: NotNegative = 0.01
    """Weight of the KL to the reference model, which is taken off the reward of each token. 0: no reference role is
    started."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Which estimator of the KL; k1 is the unbiased one in a reward."""
    reward_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards, less their baseline, are cut to it."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if not self.reward_range[0] < self.reward_range[1]:
            yield f"algorithm.reward_range={self.reward_range}; set two rewards, the lower first"


@dataclass(kw_only=True)
class ReinforceConfig(RLOptions):
    """REINFORCE++, REINFORCE++-baseline and RLOO."""

    KL_IN_REWARD: ClassVar[bool] = True

    prompts_per_step: Count = 512
    """Prompts of a training step."""
    samples_per_prompt: Count = 1
    """Responses to each; algorithm.baseline compares them with each other."""
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.algorithm.baseline != "none" and self.samples_per_prompt < 2:
            yield (
                f"algorithm.baseline={self.algorithm.baseline} compares the responses to one prompt, but "
                f"samples_per_prompt={self.samples_per_prompt}; set it to 2 or more"
            )

"""Options of this algorithm. The option groups that all RL recipes share are in training/options/rl_options.py.

`a.b=value` and `--a.b value` are equivalent. `--config FILE` reads YAML. `--help all` describes every option.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from components.ranges import Count, NotNegative, Share
from training.options.rl_options import PolicyOptions, RLOptions


@dataclass(kw_only=True)
class AlgorithmOptions(PolicyOptions):
    """Reward baseline, whitening, discount and KL penalty."""

    baseline: Literal["none", "group_mean", "leave_one_out"] = "none"
    """Baseline that is subtracted from the reward of a response. `none`: no baseline (REINFORCE++); `group_mean`: the
    mean reward of all responses to the prompt (REINFORCE++-baseline); `leave_one_out`: the mean of the others
    (RLOO)."""
    whiten: bool = True
    """Normalise the advantages of all tokens of a step to mean 0 and standard deviation 1. RLOO sets it to false."""
    gamma: Share = 1.0
    """Discount factor per token of the response."""
    kl_coef: NotNegative = 0.01
    """Weight of the KL to the reference model. The weighted KL is subtracted from the reward of each token. 0 starts no
    reference role."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the KL. As a reward only k1 is unbiased."""
    reward_range: tuple[float, float] = (-10.0, 10.0)
    """Range to which rewards are clamped after the baseline is subtracted."""

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
    """Number of prompts per training step."""
    samples_per_prompt: Count = 1
    """Number of responses sampled per prompt. A baseline (algorithm.baseline) needs at least 2."""
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.algorithm.baseline != "none" and self.samples_per_prompt < 2:
            yield (
                f"algorithm.baseline={self.algorithm.baseline} compares the responses to one prompt, but "
                f"samples_per_prompt={self.samples_per_prompt}; set it to 2 or more"
            )

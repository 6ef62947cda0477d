"""The options of this algorithm, beside the groups that all recipes share; `--help all` describes them.

`a.b=value` and `--a.b value` mean the same; `--config FILE` reads YAML.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from components.ranges import NotNegative, Share
from training.options.rl_options import PolicyOptions, RLOptions, without_effect
from training.options.schema import active_when


@dataclass(kw_only=True)
class AlgorithmOptions(PolicyOptions):
    """Advantages of turns and episodes, policy loss and KL penalty."""

    estimator: Literal["reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo", "gpg", "grpo_passk"] = (
        "reinforce_baseline"
    )
    """What becomes of a reward: itself; less the mean of all episodes of the prompt (reinforce_baseline, and dr_grpo,
    which does not whiten); less the mean of the others; divided by their deviation as well; and their relatives."""
    std_epsilon: float = active_when(1e-4, estimator=("grpo",))
    """Added to that deviation, so that rewards which differ by rounding alone teach next to nothing."""
    whiten: bool | None = None
    """Shift and scale the advantages of all tokens of a step to mean 0 and standard deviation 1. Default: with
    reinforce and reinforce_baseline."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """The return of the tokens of a turn: what the whole episode has earned, or what it earned from this turn on,
    beside the same turn of the prompt's other episodes."""
    turn_gamma: Share = 1.0
    """Discount per turn, with credit by turn."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How tokens are weighed: each the same, each episode the same, or each episode's sum, divided by the most that its
    turns may be long with -norm (Dr. GRPO)."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the reference model, which is taken off the reward of each token. 0: no reference role is
    started."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Which estimator of the KL; k1 is the unbiased one in a reward."""

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened."""
        return self.estimator.startswith("reinforce") if self.whiten is None else self.whiten


@dataclass(kw_only=True)
class MultiTurnConfig(RLOptions):
    """Policy gradients over episodes of any number of turns."""

    ROLLOUTS: ClassVar[str] = "episodes"
    KL_IN_REWARD: ClassVar[bool] = True

    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if not self.agent.func_path:
            yield "agent.func_path is empty; set it, or run without options for the demonstration"
            return
        yield from super().faults()
        if self.agent.rewarded_by == "reward":
            yield "agent.rewarded_by=reward is not in this recipe, which reads rewards of turns; use recipes/grpo"
        if self.algorithm.estimator != "reinforce" and self.samples_per_prompt < 2:
            yield (
                f"algorithm.estimator={self.algorithm.estimator} compares the episodes of one prompt, but "
                f"samples_per_prompt={self.samples_per_prompt}; set it to 2 or more"
            )

    def notes(self, given: Collection[str]) -> list[str]:
        """What a user who has named the options `given` should know of before the run starts."""
        own = self.algorithm
        idle = [
            (own.credit != "turn", "algorithm.turn_gamma", "algorithm.credit=trajectory"),
            (own.correction == "none", "algorithm.correction_range", "algorithm.correction=none"),
        ]
        return without_effect(idle, given) + super().notes(given)

"""Options of this algorithm. The option groups that all RL recipes share are in training/options/rl_options.py.

`a.b=value` and `--a.b value` are equivalent. `--config FILE` reads YAML. `--help all` describes every option.
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
    """Advantage estimator. `reinforce`: the return itself; `reinforce_baseline` and `dr_grpo` (not whitened): minus the
    mean of all episodes of the prompt; `rloo`: minus the mean of the others; `grpo`: minus the mean, divided by the
    standard deviation; `gpg` and `grpo_passk`: see docs/algorithms.md."""
    std_epsilon: float = active_when(1e-4, estimator=("grpo",))
    """Constant added to the standard deviation of `grpo`, so that returns that differ only by rounding give advantages
    near 0."""
    whiten: bool | None = None
    """Normalise the advantages of all tokens of a step to mean 0 and standard deviation 1. Default: true for
    `reinforce` and `reinforce_baseline`, false for the other estimators."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """Credit assignment. `trajectory`: all tokens share the return of the whole episode; `turn`: the tokens of a turn
    share the return from this turn on, which is compared with the same turn of the prompt's other episodes."""
    turn_gamma: Share = 1.0
    """Discount factor per turn with `credit=turn`."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """Aggregation of the token losses. `token-mean` weights all tokens equally, `seq-mean-token-mean` all episodes
    equally. `seq-mean-token-sum` sums over each episode, and `seq-mean-token-sum-norm` divides this sum by the maximum
    length of an episode's turns, rollout.max_new_tokens times agent.max_turns (Dr. GRPO)."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the reference model. The weighted KL is subtracted from the reward of each token. 0 starts no
    reference role."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the KL. As a reward only k1 is unbiased."""

    @property
    def whitens(self) -> bool:
        """True if the advantages are whitened."""
        if self.whiten is None:
            return self.estimator.startswith("reinforce")
        return self.whiten


@dataclass(kw_only=True)
class MultiTurnConfig(RLOptions):
    """Policy gradients over episodes of any number of turns."""

    ROLLOUTS: ClassVar[str] = "episodes"
    KL_IN_REWARD: ClassVar[bool] = True

    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if not self.agent.func_path:
            yield "agent.func_path is empty; set it to an environment, or run without options for the demonstration"
            return
        yield from super().faults()
        if self.agent.rewarded_by == "reward":
            yield "agent.rewarded_by=reward: this recipe needs rewards of turns from the environment; use recipes/grpo"
        if self.algorithm.estimator != "reinforce" and self.samples_per_prompt < 2:
            yield (
                f"algorithm.estimator={self.algorithm.estimator} compares the episodes of one prompt, but "
                f"samples_per_prompt={self.samples_per_prompt}; set it to 2 or more"
            )

    def notes(self, set_options: Collection[str]) -> list[str]:
        """Return the notes that are printed before the run starts.

        Args:
            set_options: names of the options that the user has set. Only these are reported as having no effect.
        """
        algorithm = self.algorithm
        idle = [
            (algorithm.credit != "turn", "algorithm.turn_gamma", "algorithm.credit=trajectory"),
            (algorithm.correction == "none", "algorithm.correction_range", "algorithm.correction=none"),
        ]
        return without_effect(idle, set_options) + super().notes(set_options)

"""Options of PPO, shared by its two recipes: the policy loss and the KL penalty."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from components.ranges import NotNegative, Positive, Range
from training.options.rl_options import PolicyOptions, RLOptions
from training.options.schema import active_when

PolicyLoss = Literal[
    "ppo", "gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro", "reinforce"
]
BY_RESPONSE = ("gspo", "sapo", "geo_mean")
"""Policy losses that are averaged over responses. The others are averaged over tokens."""
NOT_OF_RATIOS = ("geo_mean", "dppo_tv", "dppo_kl")
"""Policy losses whose clip range is not centred on an importance-sampling ratio of 1."""
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]


@dataclass(kw_only=True)
class PPOOptions(PolicyOptions):
    """Policy loss of PPO, and KL penalty. A recipe adds its advantage estimators."""

    policy_loss: PolicyLoss = "ppo"
    """Policy loss. `ppo` clips the importance-sampling ratio of each token, `gspo` the ratio of the whole response.
    `reinforce` uses no ratio. docs/algorithms.md describes `geo_mean`, `cispo`, `sapo`, `dppo_tv`, `dppo_kl`, `dro`,
    `clip_cov` and `kl_cov`."""
    clip_low: float = 0.2
    """Lower clip range: the importance-sampling ratio is clipped at 1 minus this value. With geo_mean the log-ratio is
    clipped at minus this value, in nats. With dppo_tv and dppo_kl the value is a bound of the divergence."""
    dual_clip: Annotated[float, Range(above=1)] | None = active_when(None, policy_loss=("ppo", "dppo_tv", "dppo_kl"))
    """Dual clip: maximum loss of a token with a negative advantage, in multiples of the advantage's absolute value.
    Must be above 1. Null (the default) sets no maximum. With dppo_tv and dppo_kl this is the maximum weight of a ratio,
    and null means 20."""
    tau_positive: float = active_when(1.0, policy_loss=("sapo",))
    """sapo: steepness of the gate for tokens with a positive advantage. The gate closes faster at larger values."""
    tau_negative: float = active_when(1.05, policy_loss=("sapo",))
    """sapo: steepness of the gate for tokens with a negative advantage."""
    cov_share: float = active_when(2e-4, policy_loss=("clip_cov", "kl_cov"))
    """Share of the tokens that clip_cov drops from the loss, or that kl_cov penalises."""
    cov_low: float = active_when(1.0, policy_loss=("clip_cov",))
    """clip_cov: lower bound of the covariance of the tokens that may be dropped."""
    cov_high: float = active_when(5.0, policy_loss=("clip_cov",))
    """clip_cov: upper bound of the covariance of the tokens that may be dropped."""
    kl_cov_coef: float = active_when(1.0, policy_loss=("kl_cov",))
    """kl_cov: penalty per nat of change in the log-probability of the tokens that it selects."""
    dro_beta: Positive = active_when(1.0, policy_loss=("dro",))
    """dro: weight of half the squared log-ratio of a token in the loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss, per nat per token. 0 adds no bonus. The entropy is logged in either
    case."""
    kl_estimator: KLEstimator = active_when("k3", kl_coef=True)
    """Estimator of the KL penalty. A `+` (`k1+`, `k3+`, ...) replaces the gradient by that of k2, which is unbiased."""
    kl_in_reward: bool = active_when(False, kl_coef=True)
    """Subtract the KL penalty from the reward of each token. By default it is a term of the loss."""
    kl_target: float | None = None
    """Target KL per token, in nats. kl_coef is adapted to it after each step. By default kl_coef is constant."""
    kl_horizon: int = active_when(10000, kl_target=True)
    """Number of responses over which kl_coef may change by at most 20 %."""
    overlong_buffer: int | None = None
    """Length penalty (DAPO): number of tokens before rollout.max_new_tokens over which a response loses reward
    linearly. By default there is no penalty."""
    overlong_penalty: NotNegative = active_when(1.0, overlong_buffer=True)
    """Reward that a response of maximum length loses to the length penalty."""

    @property
    def most_clip_low(self) -> float:
        """See `PolicyOptions.most_clip_low`."""
        # These are ranges of a log-ratio or of a divergence, which may exceed 1.
        if self.policy_loss in NOT_OF_RATIOS:
            return math.inf
        return super().most_clip_low


@dataclass(kw_only=True)
class PPORunOptions(RLOptions):
    """Groups of options of a PPO recipe."""

    algorithm: PPOOptions = field(default_factory=PPOOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        target, horizon, buffer = (getattr(self.algorithm, x) for x in ("kl_target", "kl_horizon", "overlong_buffer"))
        # At a horizon of a fifth of a step or less, one step could turn kl_coef to 0 or below (adapted_kl_coef).
        if target is not None and not (target > 0 and horizon > self.step_size / 5):
            yield (
                f"algorithm.kl_target={target} and algorithm.kl_horizon={horizon}; set kl_target above 0, and "
                f"kl_horizon above a fifth of the {self.step_size} responses of a step"
            )
        if buffer is not None and not 1 <= buffer <= self.rollout.max_new_tokens:
            yield f"algorithm.overlong_buffer={buffer}; set 1 to rollout.max_new_tokens={self.rollout.max_new_tokens}"

    @property
    def old_policy(self) -> str:
        """The column of old log-probabilities in the ratio: those of the trainer, or those of the rollout engine."""
        return "logprob"

"""Options of PPO in both of its recipes: the surrogate loss and the KL penalty."""

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
"""Policy losses that are means over responses; the others are means over tokens."""
NOT_OF_RATIOS = ("geo_mean", "dppo_tv", "dppo_kl")
"""Policy losses whose clip range is not around a ratio of 1."""
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]


@dataclass(kw_only=True)
class PPOOptions(PolicyOptions):
    """The policy loss of PPO, and the KL penalty. A recipe adds its advantage estimators."""

    policy_loss: PolicyLoss = "ppo"
    """Which surrogate is minimised: ppo clips the ratio of each token, gspo that of the response; geo_mean, cispo,
    sapo, dppo_tv, dppo_kl, dro, clip_cov and kl_cov are in docs/algorithms.md; reinforce has no ratio."""
    clip_low: float = 0.2
    """The importance-sampling ratio is clipped at 1 minus this; with geo_mean the log-ratio at minus this, in nats;
    with dppo_tv and dppo_kl it bounds the divergence."""
    dual_clip: Annotated[float, Range(above=1)] | None = active_when(None, policy_loss=("ppo", "dppo_tv", "dppo_kl"))
    """A token with a negative advantage costs at most this many times it, above 1. Null: any. With dppo_tv and dppo_kl
    the most that a ratio weighs; null: 20."""
    tau_positive: float = active_when(1.0, policy_loss=("sapo",))
    """sapo: how fast its gate closes for tokens with a positive advantage."""
    tau_negative: float = active_when(1.05, policy_loss=("sapo",))
    """sapo: the same for the others."""
    cov_share: float = active_when(2e-4, policy_loss=("clip_cov", "kl_cov"))
    """Share of the tokens that clip_cov drops, and kl_cov holds back."""
    cov_low: float = active_when(1.0, policy_loss=("clip_cov",))
    """clip_cov: least covariance of these."""
    cov_high: float = active_when(5.0, policy_loss=("clip_cov",))
    """clip_cov: largest covariance of these."""
    kl_cov_coef: float = active_when(1.0, policy_loss=("kl_cov",))
    """kl_cov: loss per nat that these move."""
    dro_beta: Positive = active_when(1.0, policy_loss=("dro",))
    """dro: what half the squared log-ratio of a token costs."""
    entropy_coef: float = 0.0
    """Weight of the entropy, in nats per token, that the loss rewards. It is logged in any case."""
    kl_estimator: KLEstimator = active_when("k3", kl_coef=True)
    """Which estimator of the KL; with a + its gradient is that of k2, the unbiased one."""
    kl_in_reward: bool = active_when(False, kl_coef=True)
    """The KL is taken off the reward of each token. Otherwise it is a part of the loss."""
    kl_target: float | None = None
    """Mean KL per token, in nats, that kl_coef follows after each step. Default: it stays as it is."""
    kl_horizon: int = active_when(10000, kl_target=True)
    """Responses over which kl_coef may change by a fifth."""
    overlong_buffer: int | None = None
    """Responses lose reward over the last so many tokens before rollout.max_new_tokens (DAPO). Default: they do not."""
    overlong_penalty: NotNegative = active_when(1.0, overlong_buffer=True)
    """How much a response of full length loses."""

    @property
    def most_clip_low(self) -> float:
        """See `PolicyOptions.most_clip_low`."""
        return math.inf if self.policy_loss in NOT_OF_RATIOS else super().most_clip_low


@dataclass(kw_only=True)
class PPORunOptions(RLOptions):
    """The groups of options of a recipe for PPO."""

    algorithm: PPOOptions = field(default_factory=PPOOptions)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        own, size, longest = self.algorithm, self.step_size, self.rollout.max_new_tokens
        if own.kl_target is not None and not (own.kl_target > 0 and own.kl_horizon > size / 5):
            yield (
                f"algorithm.kl_target={own.kl_target} and kl_horizon={own.kl_horizon}; set the first above 0, and the "
                f"second above a fifth of a step's {size} responses"
            )
        if own.overlong_buffer is not None and not 1 <= own.overlong_buffer <= longest:
            yield f"algorithm.overlong_buffer={own.overlong_buffer}; set 1 to rollout.max_new_tokens={longest}"

    @property
    def old_policy(self) -> str:
        """The column with the log-probabilities that the ratio is taken to, of the trainer or of the engine."""
        return "logprob"

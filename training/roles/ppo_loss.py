"""What PPO minimises, by the name of the surrogate, and the weight of its KL. `N` all tokens end to end."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from components.batch import Batch
from components.data.samples import old_logprobs
from components.rl import covariance_losses, policy_losses, ratio_losses
from components.rl.aggregation import TokenLoss
from components.rl.kl import adapted_kl_coef
from training.options.ppo_options import PPORunOptions


def surrogate(logprob_N: Tensor, micro: Batch, config: PPORunOptions) -> TokenLoss:
    """What each token costs, as `algorithm.policy_loss` says."""
    own = config.algorithm
    clip = {"clip_low": own.clip_low, "clip_high": own.clip_high}
    old_logprob_N = old_logprobs(micro, logprob_N, config.old_policy)
    columns = (logprob_N, old_logprob_N, micro["advantage"], micro["action_mask"])
    match own.policy_loss:
        case "ppo":
            return policy_losses.ppo_loss(*columns, **clip, dual_clip=own.dual_clip)
        case "gspo":
            return policy_losses.gspo_loss(*columns, micro.lengths, **clip)
        case "geo_mean":
            return ratio_losses.geo_mean_loss(*columns, micro.lengths, **clip)
        case "cispo":
            return ratio_losses.cispo_loss(*columns, **clip)
        case "sapo":
            taus = {"tau_positive": own.tau_positive, "tau_negative": own.tau_negative}
            return ratio_losses.sapo_loss(*columns, **taus)
        case "dppo_tv" | "dppo_kl" as kind:
            cap = {} if own.dual_clip is None else {"ratio_cap": own.dual_clip}
            return ratio_losses.dppo_loss(*columns, divergence="tv" if kind == "dppo_tv" else "kl", **clip, **cap)
        case "dro":
            return ratio_losses.dro_loss(*columns, beta=own.dro_beta)
        case "clip_cov":
            return covariance_losses.clip_cov_loss(*columns, micro["marked"], **clip)
        case "kl_cov":
            return covariance_losses.kl_cov_loss(*columns, micro["marked"], coef=own.kl_cov_coef)
        case "reinforce":
            return policy_losses.reinforce_loss(logprob_N, micro["advantage"], micro["action_mask"])


def mark_tokens(minibatch: Batch, index: int, config: PPORunOptions, step: int) -> Batch:
    """Add what a loss has to know of the whole optimizer step: clip_cov and kl_cov, the tokens that they treat apart.

    `index` counts the optimizer steps of the rollout step `step`.
    """
    own = config.algorithm
    if own.policy_loss not in ("clip_cov", "kl_cov"):
        return minibatch
    mask_N = minibatch["action_mask"]
    covariance_N = covariance_losses.covariances(minibatch[config.old_policy], minibatch["advantage"], mask_N)
    if own.policy_loss == "kl_cov":
        return minibatch.with_tokens(marked=covariance_losses.kl_cov_tokens(covariance_N, mask_N, share=own.cov_share))
    uniform_N = torch.from_numpy(np.random.default_rng([config.seed, step, index, 1]).random(minibatch.num_tokens))
    bounds = {"share": own.cov_share, "low": own.cov_low, "high": own.cov_high}
    return minibatch.with_tokens(marked=covariance_losses.clip_cov_tokens(covariance_N, mask_N, uniform_N, **bounds))


class AdaptedKL:
    """The weight of the KL. Where it has a target, each step beyond it weighs the KL more, and each within less."""

    def __init__(self, config: PPORunOptions) -> None:
        self.config = config
        self.coef = config.algorithm.kl_coef

    def follow(self, kl: float, samples: int) -> None:
        """Adapt the weight to the KL of so many responses, the mean over their tokens in nats."""
        own = self.config.algorithm
        if own.kl_target is not None:
            self.coef = adapted_kl_coef(self.coef, kl, target=own.kl_target, horizon=own.kl_horizon, samples=samples)

    def state_dict(self) -> dict[str, float]:
        """Give what `load_state_dict` needs."""
        return {"coef": self.coef, "kl_coef": self.config.algorithm.kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with it; one that is not adapted, or is to start elsewhere than before, is what the options say."""
        own = self.config.algorithm
        if own.kl_target is not None and state["kl_coef"] == own.kl_coef:
            self.coef = state["coef"]

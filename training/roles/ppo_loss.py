"""Surrogate losses of PPO by name, and the coefficient of its KL penalty. N: all tokens of a batch, concatenated."""

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
    """Return the loss of each token. `algorithm.policy_loss` selects the surrogate."""
    algorithm = config.algorithm
    clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    old_logprob_N = old_logprobs(micro, logprob_N, config.old_policy)
    columns = (logprob_N, old_logprob_N, micro["advantage"], micro["action_mask"])
    match algorithm.policy_loss:
        case "ppo":
            return policy_losses.ppo_loss(*columns, **clip, dual_clip=algorithm.dual_clip)
        case "gspo":
            return policy_losses.gspo_loss(*columns, micro.lengths, **clip)
        case "geo_mean":
            return ratio_losses.geo_mean_loss(*columns, micro.lengths, **clip)
        case "cispo":
            return ratio_losses.cispo_loss(*columns, **clip)
        case "sapo":
            taus = {"tau_positive": algorithm.tau_positive, "tau_negative": algorithm.tau_negative}
            return ratio_losses.sapo_loss(*columns, **taus)
        case "dppo_tv" | "dppo_kl" as kind:
            cap = {}
            # Without the option, the loss has its own maximum of 20.
            if algorithm.dual_clip is not None:
                cap["ratio_cap"] = algorithm.dual_clip
            return ratio_losses.dppo_loss(*columns, divergence="tv" if kind == "dppo_tv" else "kl", **clip, **cap)
        case "dro":
            return ratio_losses.dro_loss(*columns, beta=algorithm.dro_beta)
        case "clip_cov":
            return covariance_losses.clip_cov_loss(*columns, micro["marked"], **clip)
        case "kl_cov":
            return covariance_losses.kl_cov_loss(*columns, micro["marked"], coef=algorithm.kl_cov_coef)
        case "reinforce":
            return policy_losses.reinforce_loss(logprob_N, micro["advantage"], micro["action_mask"])


def mark_tokens(minibatch: Batch, index: int, config: PPORunOptions, step: int) -> Batch:
    """Add the column `marked`: the tokens that clip_cov and kl_cov treat differently from the others.

    They are chosen over the whole optimizer step, so a loss of one micro-batch cannot choose them. Other losses get the
    mini-batch unchanged.

    Args:
        minibatch: all responses of the optimizer step.
        index: index of the optimizer step within the rollout step, from 0.
        config: options of the run.
        step: number of the rollout step.
    """
    ppo = config.algorithm
    if ppo.policy_loss not in ("clip_cov", "kl_cov"):
        return minibatch
    mask_N = minibatch["action_mask"]
    covariance_N = covariance_losses.covariances(minibatch[config.old_policy], minibatch["advantage"], mask_N)
    # kl_cov takes the largest covariances. clip_cov draws among those within its bounds.
    if ppo.policy_loss == "kl_cov":
        return minibatch.with_tokens(marked=covariance_losses.kl_cov_tokens(covariance_N, mask_N, share=ppo.cov_share))
    uniform_N = torch.from_numpy(np.random.default_rng([config.seed, step, index, 1]).random(minibatch.num_tokens))
    bounds = {"share": ppo.cov_share, "low": ppo.cov_low, "high": ppo.cov_high}
    return minibatch.with_tokens(marked=covariance_losses.clip_cov_tokens(covariance_N, mask_N, uniform_N, **bounds))


class AdaptedKL:
    """Coefficient of the KL penalty. With `algorithm.kl_target` it rises while the KL is above the target."""

    def __init__(self, config: PPORunOptions) -> None:
        self.config = config
        self.coef = config.algorithm.kl_coef

    def follow(self, kl: float, samples: int) -> None:
        """Adapt the coefficient to `kl`, the mean over the tokens of `samples` responses, in nats."""
        ppo = self.config.algorithm
        if ppo.kl_target is not None:
            self.coef = adapted_kl_coef(self.coef, kl, target=ppo.kl_target, horizon=ppo.kl_horizon, samples=samples)

    def state_dict(self) -> dict[str, float]:
        """Return the state for `load_state_dict`."""
        return {"coef": self.coef, "kl_coef": self.config.algorithm.kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficient. Without a target or with another `algorithm.kl_coef`, the option's value is kept."""
        algorithm = self.config.algorithm
        if algorithm.kl_target is not None and state["kl_coef"] == algorithm.kl_coef:
            self.coef = state["coef"]

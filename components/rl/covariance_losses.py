"""Losses that treat the tokens with the largest covariances apart: Clip-Cov and KL-Cov.

`policy_losses` explains the arguments and metrics.
"""

import torch
from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import (
    check_columns,
    chosen,
    log_ratio,
)
from components.rl.policy_losses import ppo_loss
from components.rl.surrogate import checked_advantages, distance_metrics


def covariances(old_logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor) -> Tensor:
    """[N] (log p - mean log p)(A - mean A), the means over all tokens given: where it is large, entropy is lost.

    Source: Cui et al. 2025 (The Entropy Mechanism, arXiv 2505.22617), equation 10. It is taken once for an optimizer
    step, of the old log-probabilities, because a mean over a micro-batch would make results depend on how the step is
    cut. verl takes it over each micro-batch, of the log-probabilities now, and leaves tokens that are clipped already
    out of Clip-Cov's choice; before the first update of a batch of samples it is the same.
    """
    advantage_N = checked_advantages(old_logprob_N, old_logprob_N, advantage_N, action_mask_N)
    logprob_N = chosen(action_mask_N, old_logprob_N.detach())
    count = action_mask_N.sum().clamp(min=1)
    product_N = (logprob_N - logprob_N.sum() / count) * (advantage_N - advantage_N.sum() / count)
    return chosen(action_mask_N, product_N)


def clip_cov_tokens(
    covariance_N: Tensor, action_mask_N: Tensor, uniform_N: Tensor, *, share: float, low: float, high: float
) -> Tensor:
    """[N] bool, the tokens that `clip_cov_loss` drops: a share of all, at random among those between two covariances.

    Source: Cui et al. 2025 (arXiv 2505.22617), equation 11; at least one token where any is between.

    Args:
        covariance_N: [N] of `covariances`, over the whole optimizer step, like everything here.
        uniform_N: [N] random numbers; those with the smallest are dropped, so that the choice moves with the tokens.
        share: of all action tokens, 0 to 1; the paper has 2e-4.
        low: covariances above it; the paper has 1.
        high: and below it; the paper has 5.
    """
    check_columns(action_mask_N, covariance_N=covariance_N, uniform_N=uniform_N)
    _check_share(share)
    candidate = (action_mask_N & (covariance_N > low) & (covariance_N < high)).nonzero().squeeze(1)
    count = min(max(int(share * int(action_mask_N.sum())), 1), len(candidate))
    dropped_N = torch.zeros_like(action_mask_N)
    dropped_N[candidate[uniform_N[candidate].argsort()[:count]]] = True
    return dropped_N


def kl_cov_tokens(covariance_N: Tensor, action_mask_N: Tensor, *, share: float) -> Tensor:
    """[N] bool, the tokens that `kl_cov_loss` holds back: the share with the largest covariances, at least one.

    Source: Cui et al. 2025 (arXiv 2505.22617), equation 13.

    Args:
        covariance_N: [N] of `covariances`, over the whole optimizer step.
        share: of all action tokens, 0 to 1; the paper has 2e-3 for 7B and 2e-4 for 32B parameters.
    """
    check_columns(action_mask_N, covariance_N=covariance_N)
    _check_share(share)
    acting = action_mask_N.nonzero().squeeze(1)
    count = min(max(int(share * len(acting)), 1), len(acting))
    held_N = torch.zeros_like(action_mask_N)
    held_N[acting[covariance_N[acting].topk(count).indices]] = True
    return held_N


def clip_cov_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    dropped_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The clipped surrogate without the tokens that would cost the most entropy.

    Source: Cui et al. 2025 (Clip-Cov, arXiv 2505.22617), equation 12.

    Args:
        dropped_N: [N] bool of `clip_cov_tokens`.
    """
    check_columns(dropped_N, action_mask_N=action_mask_N)
    whole = ppo_loss(logprob_N, old_logprob_N, advantage_N, action_mask_N, clip_low=clip_low, clip_high=clip_high)
    # A NaN is not dropped: it is there to be seen.
    loss_N = torch.where(dropped_N & ~whole.loss_N.isnan(), 0.0, whole.loss_N)
    return TokenLoss(loss_N, whole.metrics | {"dropped_share": dropped_N})


def kl_cov_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    held_N: Tensor,
    *,
    coef: float,
) -> TokenLoss:
    """-r A, and coef |log r| on the tokens that would cost the most entropy.

    Source: Cui et al. 2025 (KL-Cov, arXiv 2505.22617), equation 14; the penalty is that of its listing 1.

    Args:
        held_N: [N] bool of `kl_cov_tokens`.
        coef: loss per nat that such a token's log-probability moves, at least 0; the paper has 1.
    """
    if not coef >= 0:
        raise ValueError(f"coef={coef}; set the loss per nat to 0 or more")
    check_columns(held_N, action_mask_N=action_mask_N)
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    ratio_N = own_N.exp()
    penalty_N = torch.where(held_N & action_mask_N, coef * own_N.abs(), 0.0)
    return TokenLoss(penalty_N - ratio_N * advantage_N, {"held_share": held_N, **distance_metrics(own_N, ratio_N)})


def _check_share(share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share={share}; set a share of the tokens, 0 to 1")

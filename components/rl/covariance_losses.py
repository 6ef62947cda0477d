"""Losses that treat the tokens with the largest covariances apart: Clip-Cov and KL-Cov.

`policy_losses` explains the arguments and metrics.
"""

import torch
from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import check_columns, chosen, log_ratio
from components.rl.policy_losses import ppo_loss
from components.rl.surrogate import checked_advantages, distance_metrics


def covariances(old_logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor) -> Tensor:
    """Return (log p - mean log p)(A - mean A) [N]. Tokens with a large value reduce the entropy most.

    Source: Cui et al. 2025 (The Entropy Mechanism, arXiv 2505.22617), equation 10. Call it once per optimizer step,
    with the old log-probabilities: a mean over a micro-batch would make the result depend on the micro-batch size. verl
    computes it per micro-batch from the current log-probabilities, and excludes tokens that are already clipped from
    the selection of Clip-Cov. Before the first update on a batch of samples the two are the same.
    """
    advantage_N = checked_advantages(old_logprob_N, old_logprob_N, advantage_N, action_mask_N)
    logprob_N = chosen(action_mask_N, old_logprob_N.detach())
    count = action_mask_N.sum().clamp(min=1)
    product_N = (logprob_N - logprob_N.sum() / count) * (advantage_N - advantage_N.sum() / count)
    return chosen(action_mask_N, product_N)


def clip_cov_tokens(
    covariance_N: Tensor, action_mask_N: Tensor, uniform_N: Tensor, *, share: float, low: float, high: float
) -> Tensor:
    """Return a mask [N] of the tokens that `clip_cov_loss` drops, drawn among those with a covariance within bounds.

    Source: Cui et al. 2025 (arXiv 2505.22617), equation 11. At least one token is dropped if any is within the bounds.

    Args:
        covariance_N: [N] result of `covariances` over the complete optimizer step, like all arguments here.
        uniform_N: [N] random numbers. The candidates with the smallest numbers are dropped, so the choice does not
            depend on the order of the tokens.
        share: share of all action tokens to drop, 0 to 1. The paper uses 2e-4.
        low: exclusive lower bound of the covariance. The paper uses 1.
        high: exclusive upper bound of the covariance. The paper uses 5.
    """
    check_columns(action_mask_N, covariance_N=covariance_N, uniform_N=uniform_N)
    _check_share(share)
    candidate = (action_mask_N & (covariance_N > low) & (covariance_N < high)).nonzero().squeeze(1)
    count = min(max(int(share * int(action_mask_N.sum())), 1), len(candidate))
    dropped_N = torch.zeros_like(action_mask_N)
    # The smallest of random numbers are a random choice, which the caller's seed determines.
    dropped_N[candidate[uniform_N[candidate].argsort()[:count]]] = True
    return dropped_N


def kl_cov_tokens(covariance_N: Tensor, action_mask_N: Tensor, *, share: float) -> Tensor:
    """Return a mask [N] of the tokens that `kl_cov_loss` penalises: the ones with the largest covariances.

    Source: Cui et al. 2025 (arXiv 2505.22617), equation 13.

    Args:
        covariance_N: [N] result of `covariances` over the complete optimizer step.
        share: share of all action tokens, 0 to 1, rounded down but at least one token. The paper uses 2e-3 for 7B and
            2e-4 for 32B parameters.
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
    """Clipped surrogate without the tokens that would reduce the entropy most.

    Source: Cui et al. 2025 (Clip-Cov, arXiv 2505.22617), equation 12.

    Args:
        dropped_N: [N] bool, result of `clip_cov_tokens`.
    """
    check_columns(dropped_N, action_mask_N=action_mask_N)
    ppo = ppo_loss(logprob_N, old_logprob_N, advantage_N, action_mask_N, clip_low=clip_low, clip_high=clip_high)
    # A NaN is not dropped, so that it stays visible in the loss.
    loss_N = torch.where(dropped_N & ~ppo.loss_N.isnan(), 0.0, ppo.loss_N)
    return TokenLoss(loss_N, ppo.metrics | {"dropped_share": dropped_N})


def kl_cov_loss(
    logprob_N: Tensor, old_logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor, held_N: Tensor, *, coef: float
) -> TokenLoss:
    """KL-Cov loss: -r A, plus coef |log r| on the tokens that would reduce the entropy most.

    Source: Cui et al. 2025 (KL-Cov, arXiv 2505.22617), equation 14, with the penalty of its listing 1.

    Args:
        held_N: [N] bool, result of `kl_cov_tokens`.
        coef: penalty per nat of change in the log-probability of such a token, at least 0. The paper uses 1.
    """
    if not coef >= 0:
        raise ValueError(f"coef={coef}; set a penalty per nat of 0 or more")
    check_columns(held_N, action_mask_N=action_mask_N)
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    ratio_N = log_ratio_N.exp()
    penalty_N = torch.where(held_N & action_mask_N, coef * log_ratio_N.abs(), 0.0)
    return TokenLoss(
        penalty_N - ratio_N * advantage_N, {"held_share": held_N, **distance_metrics(log_ratio_N, ratio_N)}
    )


def _check_share(share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share={share}; set a share of the tokens, 0 to 1")

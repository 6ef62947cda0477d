"""Policy losses that bound or weigh the importance ratio in other ways than PPO's clip.

`policy_losses` explains the arguments and metrics.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import action_counts, chosen, log_ratio, sequence_sums, spread
from components.rl.surrogate import checked_advantages, distance_metrics

Divergence = Literal["tv", "kl"]
"""Divergence of `dppo_loss`: total variation, or Kullback-Leibler."""


def geo_mean_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    lengths_B: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Mean advantage of the response times the geometric mean of its tokens' clipped ratios, negated.

    Source: Zhao et al. 2025 (GMPO, arXiv 2507.20673), equation 4. A log-ratio is limited to at most clip_high where the
    advantage is positive, and to at least -clip_low elsewhere. Every token of a response has the loss of the response,
    so the aggregation seq-mean-token-mean gives the paper's mean over responses.

    Args:
        lengths_B: [B] number of tokens in each sequence.
        clip_low: lower limit in nats, at least 0. The paper uses 0.4.
        clip_high: upper limit in nats, at least 0. The paper uses 0.4.
    """
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N, lengths_B)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    clipped_N = torch.where(advantage_N > 0, log_ratio_N.clamp(max=clip_high), log_ratio_N.clamp(min=-clip_low))
    count_B = action_counts(action_mask_N, lengths_B)
    ratio_B = (sequence_sums(clipped_N, lengths_B) / count_B).exp()
    loss_B = -sequence_sums(advantage_N, lengths_B) / count_B * ratio_B
    loss_N = chosen(action_mask_N, spread(loss_B, lengths_B, len(advantage_N)))
    return TokenLoss(
        loss_N, {"clip_frac": clipped_N != log_ratio_N, **distance_metrics(log_ratio_N, log_ratio_N.exp())}
    )


def cispo_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """CISPO loss, -sg(clip(r)) A log p, with the ratio as a weight without gradient.

    Clipping limits the weight of a token and never removes its gradient.

    Source: MiniMax 2025 (MiniMax-M1, arXiv 2506.13585), equations 4 and 5.

    Args:
        clip_low: the minimum weight is 1 - clip_low, with clip_low from 0 to 1. The paper has no minimum: clip_low = 1.
        clip_high: the maximum weight is 1 + clip_high.
    """
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N).detach()
    ratio_N = log_ratio_N.exp()
    weight_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -weight_N * advantage_N * chosen(action_mask_N, logprob_N)
    return TokenLoss(loss_N, {"clip_frac": weight_N != ratio_N, **distance_metrics(log_ratio_N, ratio_N)})


def sapo_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLoss:
    """SAPO loss, -A sigmoid(tau (r - 1)) 4 / tau, with a smooth gate instead of a clip range.

    The slope of the gate at r = 1 is 1.

    Source: Gao et al. 2025 (SAPO, arXiv 2511.20347), equation 5.

    Args:
        tau_positive: steepness of the gate for tokens with a positive advantage, above 0.
        tau_negative: steepness of the gate for all other tokens, above 0.
    """
    if not tau_positive > 0 or not tau_negative > 0:
        raise ValueError(f"tau_positive={tau_positive}, tau_negative={tau_negative}; set both above 0")
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    tau_N = torch.where(advantage_N > 0, tau_positive, tau_negative)
    # expm1 keeps the digits that r - 1 loses near r = 1.
    gate_N = torch.sigmoid(tau_N * torch.expm1(log_ratio_N)) * (4.0 / tau_N)
    return TokenLoss(-advantage_N * gate_N, distance_metrics(log_ratio_N, log_ratio_N.exp()))


def dppo_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    *,
    divergence: Divergence,
    clip_low: float,
    clip_high: float,
    ratio_cap: float = 20.0,
) -> TokenLoss:
    """DPPO loss, -sg(min(r, cap)) A log p, without the tokens that left the trust region.

    A token is dropped if its probability has moved in the direction of its advantage by more than the limit.

    Source: Qi et al. 2026 (DPPO, arXiv 2602.04879). The trust region is a divergence between the token and all other
    tokens. It allows large ratios of rare tokens, and restricts small ratios of probable tokens.

    Args:
        divergence: "tv": |p - p_old|; "kl": p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), in nats.
        clip_low: maximum divergence of a token that has become less likely, at least 0.
        clip_high: maximum divergence of a token that has become more likely, at least 0.
        ratio_cap: maximum weight of a token, at least 1.
    """
    if divergence not in get_args(Divergence):
        raise ValueError(f"divergence={divergence!r} is unknown; set one of {', '.join(get_args(Divergence))}")
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N).detach()
    # Rounding may give log-probabilities slightly above 0, whose 1 - p would be negative.
    new_N = chosen(action_mask_N, logprob_N.detach()).clamp(max=0.0)
    old_N = chosen(action_mask_N, old_logprob_N.detach()).clamp(max=0.0)
    old_p_N = old_N.exp()
    gap_N = new_N.exp() - old_p_N
    if divergence == "tv":
        distance_N = gap_N.abs()
    else:
        # 1 - p of a probable token: 1 - exp would lose its digits, and its log must not be -inf.
        old_rest_N = -torch.expm1(old_N)
        log_rest_N = (-torch.expm1(new_N)).clamp(min=1e-20).log()
        old_log_rest_N = old_rest_N.clamp(min=1e-20).log()
        distance_N = old_p_N * (old_N - new_N) + old_rest_N * (old_log_rest_N - log_rest_N)
    up_N = (advantage_N > 0) & (gap_N > 0)
    down_N = (advantage_N < 0) & (gap_N < 0)
    dropped_N = (up_N & (distance_N > clip_high)) | (down_N & (distance_N > clip_low))
    ratio_N = log_ratio_N.exp()
    loss_N = -ratio_N.clamp(max=ratio_cap) * advantage_N * chosen(action_mask_N, logprob_N)
    return TokenLoss(
        torch.where(dropped_N, 0.0, loss_N), {"clip_frac": dropped_N, **distance_metrics(log_ratio_N, ratio_N)}
    )


def dro_loss(
    logprob_N: Tensor, old_logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor, *, beta: float
) -> TokenLoss:
    """DRO loss, -A log p + beta / 2 (log p - log p_old)^2, with a squared penalty instead of a ratio.

    Source: Richemond et al. 2024 (DRO, arXiv 2405.19107), per token, and with A in place of the value-based advantage,
    as in verl.

    Args:
        beta: weight of the penalty, above 0.
    """
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    loss_N = 0.5 * beta * log_ratio_N.square() - advantage_N * chosen(action_mask_N, logprob_N)
    return TokenLoss(loss_N, distance_metrics(log_ratio_N, log_ratio_N.exp()))

"""Policy losses that bound or weigh the importance ratio in other ways than PPO's clip.

`policy_losses` explains the arguments and metrics.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import (
    action_counts,
    chosen,
    log_ratio,
    sequence_sums,
    spread,
)
from components.rl.surrogate import checked_advantages, distance_metrics

Divergence = Literal["tv", "kl"]


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
    """The response's mean advantage times the geometric mean of its tokens' ratios, each clipped on its own.

    Source: Zhao et al. 2025 (GMPO, arXiv 2507.20673), equation 4. A log-ratio is cut above clip_high where the
    advantage is positive, and below -clip_low where it is not. Every token of a response has the response's loss, so
    that the aggregation seq-mean-token-mean gives the paper's mean over responses.

    Args:
        lengths_B: [B] tokens in each sequence.
        clip_low: in nats, at least 0; the paper has 0.4.
        clip_high: in nats, at least 0; the paper has 0.4.
    """
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N, lengths_B)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    kept_N = torch.where(advantage_N > 0, own_N.clamp(max=clip_high), own_N.clamp(min=-clip_low))
    count_B = action_counts(action_mask_N, lengths_B)
    ratio_B = (sequence_sums(kept_N, lengths_B) / count_B).exp()
    loss_B = -sequence_sums(advantage_N, lengths_B) / count_B * ratio_B
    loss_N = chosen(action_mask_N, spread(loss_B, lengths_B, len(advantage_N)))
    return TokenLoss(loss_N, {"clip_frac": kept_N != own_N, **distance_metrics(own_N, own_N.exp())})


def cispo_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-sg(clip(r)) A log p: the ratio is a weight, and clipping it takes no token's gradient away.

    Source: MiniMax 2025 (MiniMax-M1, arXiv 2506.13585), equations 4 and 5.

    Args:
        clip_low: the weight is kept above 1 - clip_low, 0 to 1; the paper sets no such bound, which is 1.
        clip_high: the weight is kept below 1 + clip_high.
    """
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N).detach()
    ratio_N = own_N.exp()
    weight_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -weight_N * advantage_N * chosen(action_mask_N, logprob_N)
    return TokenLoss(loss_N, {"clip_frac": weight_N != ratio_N, **distance_metrics(own_N, ratio_N)})


def sapo_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLoss:
    """-A sigmoid(tau (r - 1)) 4 / tau: a gate that closes smoothly instead of a clip; at r = 1 its slope is 1.

    Source: Gao et al. 2025 (SAPO, arXiv 2511.20347), equation 5.

    Args:
        tau_positive: how fast it closes for tokens with a positive advantage, more than 0.
        tau_negative: the same for the others.
    """
    if not tau_positive > 0 or not tau_negative > 0:
        raise ValueError(f"tau_positive={tau_positive}, tau_negative={tau_negative}; set both above 0")
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    tau_N = torch.where(advantage_N > 0, tau_positive, tau_negative)
    gate_N = torch.sigmoid(tau_N * torch.expm1(own_N)) * (4.0 / tau_N)
    return TokenLoss(-advantage_N * gate_N, distance_metrics(own_N, own_N.exp()))


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
    """-sg(min(r, cap)) A log p on tokens whose probability has not moved too far to where the advantage pulls it.

    Source: Qi et al. 2026 (DPPO, arXiv 2602.04879): the trust region is a divergence of the token against all others,
    which leaves freedom to rare tokens whose ratio is large, and binds likely ones whose ratio is not.

    Args:
        divergence: "tv": |p - p_old|; "kl": p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), in nats.
        clip_low: of the divergence of a token that has become less likely, at least 0.
        clip_high: of one that has become likelier, at least 0.
        ratio_cap: largest weight of a token, at least 1.
    """
    if divergence not in get_args(Divergence):
        raise ValueError(f"divergence={divergence!r} is unknown; set one of {', '.join(get_args(Divergence))}")
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N).detach()
    now_N, old_N = (chosen(action_mask_N, x_N.detach()).clamp(max=0.0) for x_N in (logprob_N, old_logprob_N))
    now_p_N, old_p_N = now_N.exp(), old_N.exp()
    gap_N = now_p_N - old_p_N
    if divergence == "tv":
        distance_N = gap_N.abs()
    else:
        # What is left of a likely token's distribution; 1 - exp would lose its digits, and its log must not be -inf.
        rest_N, old_rest_N = (-torch.expm1(x_N) for x_N in (now_N, old_N))
        log_rest_N, old_log_rest_N = (x_N.clamp(min=1e-20).log() for x_N in (rest_N, old_rest_N))
        distance_N = old_p_N * (old_N - now_N) + old_rest_N * (old_log_rest_N - log_rest_N)
    up_N, down_N = (advantage_N > 0) & (gap_N > 0), (advantage_N < 0) & (gap_N < 0)
    dropped_N = (up_N & (distance_N > clip_high)) | (down_N & (distance_N > clip_low))
    ratio_N = own_N.exp()
    loss_N = -ratio_N.clamp(max=ratio_cap) * advantage_N * chosen(action_mask_N, logprob_N)
    return TokenLoss(torch.where(dropped_N, 0.0, loss_N), {"clip_frac": dropped_N, **distance_metrics(own_N, ratio_N)})


def dro_loss(
    logprob_N: Tensor, old_logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor, *, beta: float
) -> TokenLoss:
    """-A log p + beta / 2 (log p - log p_old)^2: a squared leash instead of a ratio.

    Source: Richemond et al. 2024 (DRO, arXiv 2405.19107), token by token and with A for what its value function gives,
    as in verl.

    Args:
        beta: what it costs to move, above 0.
    """
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    loss_N = 0.5 * beta * own_N.square() - advantage_N * chosen(action_mask_N, logprob_N)
    return TokenLoss(loss_N, distance_metrics(own_N, own_N.exp()))

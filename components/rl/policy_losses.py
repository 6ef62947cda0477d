"""Policy losses: per-token losses whose minimisation increases the probability of good actions.

Shape suffixes: B sequences; N all tokens of a micro-batch end to end. Each function returns the loss [N] of every
token; `aggregation` reduces it to a scalar. Common arguments:

- `logprob_N`: [N] current log-probability in nats. Gradients flow only through it.
- `old_logprob_N`: [N] log-probability in nats before the first update on these samples.
- `advantage_N`: [N] advantage of each token.
- `action_mask_N`: [N] bool, True where the policy produced the token. Entries elsewhere may have any value, even NaN.

r = exp(logprob - old_logprob) is the ratio, with the log-ratio clamped to +-20. Metrics: `ratio_mean`; `approx_kl`, the
k3 estimate of the KL from the old policy in nats, which is 0 only while every token's ratio is 1; and `clip_frac`, the
share of tokens that a clip range changes. All functions raise a ValueError if shapes differ.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import action_counts, check_columns, check_lengths, chosen, log_ratio, sequence_sums, spread

Divergence = Literal["tv", "kl"]
"""Divergence of `dppo_loss`: total variation, or Kullback-Leibler."""


def ppo_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Clipped surrogate of PPO: max(-r A, -clip(r, 1 - low, 1 + high) A).

    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; two separate bounds: Yu et al. 2025 (DAPO, arXiv
    2503.14476), equation 8; the dual clip: Ye et al. 2020 (arXiv 1912.09729), equation 5.

    Args:
        clip_low: the lower bound of the ratio is 1 - clip_low, 0 to 1.
        clip_high: the upper bound of the ratio is 1 + clip_high, at least 0.
        dual_clip: above 1: the loss of a token with a negative advantage is at most -dual_clip A, whatever its ratio.
            The metric `dual_clip_frac` is the share of tokens with that loss. None sets no such bound.
    """
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    return _clipped(log_ratio(logprob_N, old_logprob_N, action_mask_N), advantage_N, clip_low, clip_high, dual_clip)


def gspo_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    lengths_B: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Clipped surrogate on the ratio of the response, which is the geometric mean of its tokens' ratios.

    Source: Zheng et al. 2025 (GSPO, arXiv 2507.18071), equation 14 (GSPO-token). Every token has the value of the
    response's ratio and the gradient of its own, so advantages may differ between tokens. With equal advantages and the
    aggregation seq-mean-token-mean it is equation 5.

    Args:
        lengths_B: [B] number of tokens in each sequence.
        clip_low: as in `ppo_loss`. The paper uses 3e-4.
        clip_high: as in `ppo_loss`. The paper uses 4e-4.
    """
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N, lengths_B)
    token_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    response_B = sequence_sums(token_N.detach(), lengths_B) / action_counts(action_mask_N, lengths_B)
    response_N = spread(response_B, lengths_B, len(token_N))
    # The bracket is exactly 0. Summed in another order, rounding would change the response's ratio, whose clip range is
    # narrow.
    log_ratio_N = chosen(action_mask_N, response_N) + (token_N - token_N.detach())
    loss = _clipped(log_ratio_N, advantage_N, clip_low, clip_high)
    # Metrics of the tokens, not of the response: its ratio may be 1 while the ratios of its tokens are far from 1.
    return TokenLoss(loss.loss_N, loss.metrics | _distance(token_N, token_N.exp()))


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
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N, lengths_B)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    clipped_N = torch.where(advantage_N > 0, log_ratio_N.clamp(max=clip_high), log_ratio_N.clamp(min=-clip_low))
    count_B = action_counts(action_mask_N, lengths_B)
    ratio_B = (sequence_sums(clipped_N, lengths_B) / count_B).exp()
    loss_B = -sequence_sums(advantage_N, lengths_B) / count_B * ratio_B
    loss_N = chosen(action_mask_N, spread(loss_B, lengths_B, len(advantage_N)))
    return TokenLoss(loss_N, {"clip_frac": clipped_N != log_ratio_N, **_distance(log_ratio_N, log_ratio_N.exp())})


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
        clip_low: the minimum weight is 1 - clip_low, 0 to 1. The paper has no such bound, which is 1.
        clip_high: the maximum weight is 1 + clip_high.
    """
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N).detach()
    ratio_N = log_ratio_N.exp()
    weight_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -weight_N * advantage_N * chosen(action_mask_N, logprob_N)
    return TokenLoss(loss_N, {"clip_frac": weight_N != ratio_N, **_distance(log_ratio_N, ratio_N)})


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
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    tau_N = torch.where(advantage_N > 0, tau_positive, tau_negative)
    # expm1 keeps the digits that r - 1 loses near r = 1.
    gate_N = torch.sigmoid(tau_N * torch.expm1(log_ratio_N)) * (4.0 / tau_N)
    return TokenLoss(-advantage_N * gate_N, _distance(log_ratio_N, log_ratio_N.exp()))


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
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
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
    return TokenLoss(torch.where(dropped_N, 0.0, loss_N), {"clip_frac": dropped_N, **_distance(log_ratio_N, ratio_N)})


def dro_loss(
    logprob_N: Tensor, old_logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor, *, beta: float
) -> TokenLoss:
    """DRO loss, -A log p + beta / 2 (log p - log p_old)^2, with a squared penalty instead of a ratio.

    Source: Richemond et al. 2024 (DRO, arXiv 2405.19107), per token, and with A in place of the value-based advantage,
    as in verl.

    Args:
        beta: weight of the penalty, above 0.
    """
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    loss_N = 0.5 * beta * log_ratio_N.square() - advantage_N * chosen(action_mask_N, logprob_N)
    return TokenLoss(loss_N, _distance(log_ratio_N, log_ratio_N.exp()))


def reinforce_loss(logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor) -> TokenLoss:
    """REINFORCE loss, -A log p.

    Use it with one update per batch of samples: nothing keeps the policy near the one that generated them.

    Source: Williams 1992, REINFORCE; with `advantages.gpg` it is the loss of GPG.
    """
    advantage_N = _checked(logprob_N, logprob_N, advantage_N, action_mask_N)
    return TokenLoss(-advantage_N * chosen(action_mask_N, logprob_N))


def entropy_loss(entropy_N: Tensor, action_mask_N: Tensor) -> TokenLoss:
    """Negative entropy, to be added to the loss with a small weight, so that the policy keeps exploring.

    Source: Williams and Peng 1991; Mnih et al. 2016 (A3C, arXiv 1602.01783), section 4.

    Args:
        entropy_N: [N] entropy of each token's distribution in nats, with gradient.
    """
    check_columns(action_mask_N, entropy_N=entropy_N)
    entropy_N = chosen(action_mask_N, entropy_N)
    return TokenLoss(-entropy_N, {"entropy": entropy_N.detach()})


def covariances(old_logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor) -> Tensor:
    """Return (log p - mean log p)(A - mean A) [N]. Tokens with a large value reduce the entropy most.

    Source: Cui et al. 2025 (The Entropy Mechanism, arXiv 2505.22617), equation 10. Call it once per optimizer step,
    with the old log-probabilities: a mean over a micro-batch would make the result depend on the micro-batch size. verl
    computes it per micro-batch from the current log-probabilities, and excludes tokens that are already clipped from
    the selection of Clip-Cov. Before the first update on a batch of samples the two are the same.
    """
    advantage_N = _checked(old_logprob_N, old_logprob_N, advantage_N, action_mask_N)
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
        raise ValueError(f"coef={coef}; set the loss per nat to 0 or more")
    check_columns(held_N, action_mask_N=action_mask_N)
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    log_ratio_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    ratio_N = log_ratio_N.exp()
    penalty_N = torch.where(held_N & action_mask_N, coef * log_ratio_N.abs(), 0.0)
    return TokenLoss(penalty_N - ratio_N * advantage_N, {"held_share": held_N, **_distance(log_ratio_N, ratio_N)})


def _clipped(
    log_ratio_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    ratio_N = log_ratio_N.exp()
    gain_N = ratio_N * advantage_N
    clipped_gain_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_N
    metrics = {"clip_frac": clipped_gain_N < gain_N, **_distance(log_ratio_N, ratio_N)}
    gain_N = torch.minimum(gain_N, clipped_gain_N)
    if dual_clip is not None:
        bounded_N = (advantage_N < 0) & (gain_N < dual_clip * advantage_N)
        gain_N = torch.where(bounded_N, dual_clip * advantage_N, gain_N)
        metrics["dual_clip_frac"] = bounded_N
    return TokenLoss(-gain_N, metrics)


def _checked(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    lengths_B: Tensor | None = None,
) -> Tensor:
    """Check all shapes, and return the advantages without gradient, 0 outside the mask."""
    check_columns(action_mask_N, logprob_N=logprob_N, old_logprob_N=old_logprob_N, advantage_N=advantage_N)
    if lengths_B is not None:
        check_lengths(action_mask_N, lengths_B)
    return chosen(action_mask_N, advantage_N.detach())


def _check_share(share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share={share}; set a share of the tokens, 0 to 1")


def _distance(log_ratio_N: Tensor, ratio_N: Tensor) -> dict[str, Tensor]:
    """Return metrics of the distance between the policy and the old policy at each token."""
    log_ratio_N = log_ratio_N.detach()
    return {"ratio_mean": ratio_N.detach(), "approx_kl": torch.expm1(log_ratio_N) - log_ratio_N}

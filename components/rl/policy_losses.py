"""Policy losses: what is minimised to make good actions likelier.

B sequences; N all tokens of a micro-batch end to end. Each function gives the loss of every token, [N]; `aggregation`
makes one number of it. `logprob_N` is the log-probability now, in nats, and the only thing that gradients flow through;
`old_logprob_N` is the same before the first update on these samples; `action_mask_N` is True where the policy produced
the token, and what is outside of it may be anything, NaN too. r = exp(logprob - old_logprob) is the ratio, with the
log-ratio kept within +-20. Metrics: `ratio_mean` and `approx_kl`, the k3 estimate of the KL from the old policy in
nats, which is 0 only while every token's ratio is 1; and `clip_frac` of tokens that a clip range changes.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import (
    action_counts,
    check_columns,
    check_lengths,
    chosen,
    log_ratio,
    sequence_sums,
    spread,
)

Divergence = Literal["tv", "kl"]


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
    """Clipped surrogate, max(-r A, -clip(r, 1 - low, 1 + high) A): what the ratio gains outside does not count.

    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; two separate bounds: Yu et al. 2025 (DAPO, arXiv
    2503.14476), equation 8; the dual clip: Ye et al. 2020 (arXiv 1912.09729), equation 5.

    Args:
        clip_low: the ratio is kept above 1 - clip_low, 0 to 1.
        clip_high: the ratio is kept below 1 + clip_high, at least 0.
        dual_clip: more than 1: a token with a negative advantage costs at most -dual_clip A, however likely it has
            become. `dual_clip_frac` says on how many tokens. None: no such bound.
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
    """The clipped surrogate on the ratio of the whole response, the geometric mean of its tokens' ratios.

    Source: Zheng et al. 2025 (GSPO, arXiv 2507.18071), equation 14 (GSPO-token): every token has the response's ratio
    as its value and its own gradient, so tokens may differ in advantage. With equal advantages and the aggregation
    seq-mean-token-mean it is equation 5.

    Args:
        lengths_B: [B] tokens in each sequence.
        clip_low: as in `ppo_loss`; the paper has 3e-4.
        clip_high: as in `ppo_loss`; the paper has 4e-4.
    """
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N, lengths_B)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    response_B = sequence_sums(own_N.detach(), lengths_B) / action_counts(action_mask_N, lengths_B)
    response_N = spread(response_B, lengths_B, len(own_N))
    # The difference is exactly 0; in another order it would round the response's ratio, whose clip range is narrow.
    log_ratio_N = chosen(action_mask_N, response_N) + (own_N - own_N.detach())
    loss = _clipped(log_ratio_N, advantage_N, clip_low, clip_high)
    # Of the responses the ratio may be 1 while their tokens are far from it.
    return TokenLoss(loss.loss_N, loss.metrics | _distance(own_N, own_N.exp()))


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
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N, lengths_B)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    kept_N = torch.where(advantage_N > 0, own_N.clamp(max=clip_high), own_N.clamp(min=-clip_low))
    count_B = action_counts(action_mask_N, lengths_B)
    ratio_B = (sequence_sums(kept_N, lengths_B) / count_B).exp()
    loss_B = -sequence_sums(advantage_N, lengths_B) / count_B * ratio_B
    loss_N = chosen(action_mask_N, spread(loss_B, lengths_B, len(advantage_N)))
    return TokenLoss(loss_N, {"clip_frac": kept_N != own_N, **_distance(own_N, own_N.exp())})


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
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N).detach()
    ratio_N = own_N.exp()
    weight_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -weight_N * advantage_N * chosen(action_mask_N, logprob_N)
    return TokenLoss(loss_N, {"clip_frac": weight_N != ratio_N, **_distance(own_N, ratio_N)})


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
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    tau_N = torch.where(advantage_N > 0, tau_positive, tau_negative)
    gate_N = torch.sigmoid(tau_N * torch.expm1(own_N)) * (4.0 / tau_N)
    return TokenLoss(-advantage_N * gate_N, _distance(own_N, own_N.exp()))


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
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
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
    return TokenLoss(torch.where(dropped_N, 0.0, loss_N), {"clip_frac": dropped_N, **_distance(own_N, ratio_N)})


def dro_loss(
    logprob_N: Tensor, old_logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor, *, beta: float
) -> TokenLoss:
    """-A log p + beta / 2 (log p - log p_old)^2: a squared leash instead of a ratio.

    Source: Richemond et al. 2024 (DRO, arXiv 2405.19107), token by token and with A for what its value function gives,
    as in verl.

    Args:
        beta: what it costs to move, above 0.
    """
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    loss_N = 0.5 * beta * own_N.square() - advantage_N * chosen(action_mask_N, logprob_N)
    return TokenLoss(loss_N, _distance(own_N, own_N.exp()))


def reinforce_loss(logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor) -> TokenLoss:
    """-A log p, for one update per batch of samples: nothing holds the policy near the one that made them.

    Source: Williams 1992, REINFORCE; with `advantages.gpg` it is the loss of GPG.
    """
    advantage_N = _checked(logprob_N, logprob_N, advantage_N, action_mask_N)
    return TokenLoss(-advantage_N * chosen(action_mask_N, logprob_N))


def entropy_loss(entropy_N: Tensor, action_mask_N: Tensor) -> TokenLoss:
    """-H: to be added with a small weight, so that the policy keeps trying.

    Source: Williams and Peng 1991; Mnih et al. 2016 (A3C, arXiv 1602.01783), section 4.

    Args:
        entropy_N: [N] nats, of the distribution that each token was drawn from, with gradient.
    """
    check_columns(action_mask_N, entropy_N=entropy_N)
    entropy_N = chosen(action_mask_N, entropy_N)
    return TokenLoss(-entropy_N, {"entropy": entropy_N.detach()})


def covariances(old_logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor) -> Tensor:
    """[N] (log p - mean log p)(A - mean A), the means over all tokens given: where it is large, entropy is lost.

    Source: Cui et al. 2025 (The Entropy Mechanism, arXiv 2505.22617), equation 10. It is taken once for an optimizer
    step, of the old log-probabilities, because a mean over a micro-batch would make results depend on how the step is
    cut. verl takes it over each micro-batch, of the log-probabilities now, and leaves tokens that are clipped already
    out of Clip-Cov's choice; before the first update of a batch of samples it is the same.
    """
    advantage_N = _checked(old_logprob_N, old_logprob_N, advantage_N, action_mask_N)
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
    advantage_N = _checked(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    ratio_N = own_N.exp()
    penalty_N = torch.where(held_N & action_mask_N, coef * own_N.abs(), 0.0)
    return TokenLoss(penalty_N - ratio_N * advantage_N, {"held_share": held_N, **_distance(own_N, ratio_N)})


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
    """The advantages where the policy acted, 0 elsewhere, after a look at all shapes."""
    check_columns(action_mask_N, logprob_N=logprob_N, old_logprob_N=old_logprob_N, advantage_N=advantage_N)
    if lengths_B is not None:
        check_lengths(action_mask_N, lengths_B)
    return chosen(action_mask_N, advantage_N.detach())


def _check_share(share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share={share}; set a share of the tokens, 0 to 1")


def _distance(log_ratio_N: Tensor, ratio_N: Tensor) -> dict[str, Tensor]:
    """How far the policy is from the old one, token by token."""
    own_N = log_ratio_N.detach()
    return {"ratio_mean": ratio_N.detach(), "approx_kl": torch.expm1(own_N) - own_N}

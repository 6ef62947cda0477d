"""Corrections for samples from an engine whose probabilities differ slightly from the trainer's.

Shape suffixes: B sequences; N all tokens of a batch end to end; M action tokens among them.

For each token, p is its probability in the trainer, q its probability in the engine that sampled it, and
d = log p - log q in nats, clamped to +-20. For a sequence, d is the sum or the mean over its action tokens, clamped to
+-20 too. exp(d) is the ratio of the token or sequence.

The functions return one factor per token, by which its loss is multiplied. The denominators of the loss do not change,
as in OpenRLHF. verl removes rejected tokens from the denominators, which gives the remaining tokens more weight.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.masked import (
    LOG_RATIO_LIMIT,
    chosen,
    sequence_means,
    sequence_sums,
    spread,
)
from components.rl.mismatch import is_outside, is_within, k3, log_ratios

Level = Literal["token", "sequence", "geometric"]
"""Level of the ratio: per token, per sequence (the product), or the geometric mean over the sequence."""
Largest = Literal["max"]
"""Level "max": the maximum over the sequence, for estimates that are never negative."""
Outside = Literal["clamp", "zero"]
"""Treatment of a weight outside its bounds: clamp to the nearest bound, or set to 0."""
Estimator = Literal["k1", "k2", "k3"]
"""Criterion for accepting a token or sequence: its ratio (k1), or an estimate of the KL divergence there (k2, k3)."""


@torch.no_grad()
def importance_weights(
    logprob_N: Tensor,
    rollout_logprob_N: Tensor,
    action_mask_N: Tensor,
    lengths_B: Tensor,
    *,
    level: Level,
    low: float,
    high: float,
    outside: Outside,
) -> Tensor:
    """Return the bounded importance weight p / q of each token, at the given level.

    Source: "clamp" with low = 0 is truncated importance sampling (TIS), Ionides 2008; for rollout engines Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training". "zero" at the token level is
    IcePop, Ling team 2025 (arXiv 2510.18855).

    Args:
        logprob_N: [N] log p in nats, before the first update on these samples.
        rollout_logprob_N: [N] log q in nats.
        action_mask_N: [N] bool, True where the policy produced the token. Log-probabilities elsewhere are ignored.
        lengths_B: [B] number of tokens in each sequence.
        level: ratio of the token, of its sequence, or the geometric mean over its sequence.
        low: minimum weight, at least 0.
        high: maximum weight, above 0 and at least low. inf sets no bound.
        outside: a weight outside [low, high] becomes the nearest bound ("clamp") or 0 ("zero").

    Returns:
        [N] float32 without gradient, 0 outside the mask. A NaN inside the mask gives NaN at its token, or in its
        sequence.

    Raises:
        ValueError: shapes differ, or `level` or `outside` is unknown.
    """
    d_N = log_ratios(logprob_N, rollout_logprob_N, action_mask_N, lengths_B)
    weight_N = _ratios(d_N, action_mask_N, lengths_B, level)
    if outside == "clamp":
        weight_N = weight_N.clamp(low, high)
    elif outside == "zero":
        weight_N = torch.where(is_outside(weight_N, low, high), 0.0, weight_N)
    else:
        raise ValueError(f"outside={outside!r} is unknown; set one of {', '.join(get_args(Outside))}")
    return chosen(action_mask_N, weight_N)


@torch.no_grad()
def rejection_weights(
    logprob_N: Tensor,
    rollout_logprob_N: Tensor,
    action_mask_N: Tensor,
    lengths_B: Tensor,
    *,
    level: Level | Largest,
    estimator: Estimator,
    low: float | None,
    high: float,
) -> Tensor:
    """Return 1 for tokens to train on, and 0 for tokens where p and q are too far apart.

    - `k1`: accepted if low <= p / q <= high, with the ratio of the level. (verl bounds q / p; its low is our 1 / high.)
    - `k2`, `k3`: accepted if d^2 / 2, or exp(d) - 1 - d, is at most high. The level selects the token's estimate, the
      sum over the sequence, the mean over it ("geometric"), or the maximum in it ("max"). Both estimates are never
      negative, so opposite deviations of two tokens do not cancel, as they do in the ratio of a sequence.

    Masked importance sampling (MIS) is the product of k1 and `importance_weights`. OpenRLHF's seq-mask-tis is
    documented to clamp the importance weights, but does not. Here the two are separate functions.

    Source: Schulman 2020, "Approximating KL Divergence", for the estimators; verl's rollout correction for rejecting
    by them. k3 has verl's sign: its mean over tokens sampled from q is KL(q, p).

    Args:
        logprob_N: [N] log p, as in `importance_weights`, like all arguments that are not listed here.
        level: level of the ratio or estimate. The decision for a sequence applies to all its tokens.
        estimator: one of the three names above.
        low: k1: minimum ratio, at least 0, None for no bound. k2, k3: None, because they are never below 0.
        high: above 0. k1: maximum ratio, at least low. k2, k3: maximum estimate in nats.

    Returns:
        [N] float32 without gradient: 1 or 0, or NaN where the ratio or estimate is NaN; 0 outside the mask.

    Raises:
        ValueError: shapes differ, or `level` or `estimator` is unknown.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"estimator={estimator!r} is unknown; set one of {', '.join(get_args(Estimator))}")
    d_N = log_ratios(logprob_N, rollout_logprob_N, action_mask_N, lengths_B)
    if estimator == "k1":
        criterion_N = _ratios(d_N, action_mask_N, lengths_B, level)
    elif estimator == "k2":
        criterion_N = _at_level(d_N.square() / 2, action_mask_N, lengths_B, level)
    else:
        criterion_N = _at_level(k3(d_N), action_mask_N, lengths_B, level)
    return chosen(action_mask_N, is_within(criterion_N, low or 0.0, high))


def _ratios(d_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, level: Level | Largest) -> Tensor:
    return _at_level(d_N, action_mask_N, lengths_B, level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _at_level(x_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, level: Level | Largest) -> Tensor:
    """Return x [N] (0 outside the mask), or its sum, mean or maximum over the sequence at each token."""
    if level == "max":
        largest = [x_S.max().expand(len(x_S)) for x_S in x_N.split(lengths_B.tolist()) if len(x_S)]
        return torch.cat([x_N[:0], *largest])
    if level not in get_args(Level):
        raise ValueError(f"level={level!r} is unknown; set one of {', '.join(get_args(Level))}")
    if level == "token":
        return x_N
    if level == "sequence":
        x_B = sequence_sums(x_N, lengths_B)
    else:
        x_B = sequence_means(x_N, action_mask_N, lengths_B)
    return spread(x_B, lengths_B, len(x_N))

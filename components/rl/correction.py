"""Corrections for samples from an engine whose probabilities differ a little from the trainer's.

B sequences; N all tokens of a batch end to end; M action tokens among them. Of each token p is the trainer's
probability, q that of the engine that sampled it, and d = log p - log q in nats, kept within +-20; of a sequence the
sum of d or its mean over the action tokens, kept within +-20 too. Their exp is the ratio of that level.

What comes out is a number for each token by which its loss is multiplied. The counts that a loss is divided by stay as
they are, as in OpenRLHF; verl takes rejected tokens out of them, so that those that are left count for more.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.masked import (
    LOG_RATIO_LIMIT,
    check_columns,
    check_lengths,
    chosen,
    log_ratio,
    sequence_means,
    sequence_sums,
    spread,
)

Level = Literal["token", "sequence", "geometric"]
"""Whose ratio: the token's, its sequence's (the product), or the geometric mean over its sequence."""
Largest = Literal["max"]
"""The largest of its sequence, for what is never below 0."""
Outside = Literal["clamp", "zero"]
"""What becomes of a weight outside its bounds: the nearest bound, or 0."""
Estimator = Literal["k1", "k2", "k3"]
"""By what a token or a sequence is accepted: its ratio, or an estimate of how far p and q are apart there."""


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
    """The ratio p / q of each token, of its sequence, or the geometric mean over its sequence, within bounds.

    Source: "clamp" with low = 0 is truncated importance sampling (TIS), Ionides 2008; for rollout engines Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training". "zero" at the token level is
    IcePop, Ling team 2025 (arXiv 2510.18855).

    Args:
        logprob_N: [N] log p, nats, before the first update on these samples.
        rollout_logprob_N: [N] log q, nats.
        action_mask_N: [N] bool, True where the policy produced the token; only there are the others read.
        lengths_B: [B] tokens in each sequence.
        level: whose ratio.
        low: the least weight, at least 0.
        high: the largest weight, more than 0, at least low; inf for no bound.
        outside: a weight outside [low, high] becomes the nearest bound ("clamp") or 0 ("zero").

    Returns:
        [N] float32 without gradient, 0 where the policy did not act. A NaN that counts is NaN at its token, or in its
        sequence.

    Raises:
        ValueError: the shapes cannot be, or a name is unknown.
    """
    d_N = _log_ratios(logprob_N, rollout_logprob_N, action_mask_N, lengths_B)
    weight_N = _ratios(d_N, action_mask_N, lengths_B, level)
    if outside == "clamp":
        weight_N = weight_N.clamp(low, high)
    elif outside == "zero":
        weight_N = torch.where(_beyond(weight_N, low, high), 0.0, weight_N)
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
    """1 for the tokens that are trained on, 0 for those where p and q are too far apart.

    - `k1`: kept while low <= p / q <= high, the ratio of the level. (verl bounds q / p: its low is 1 / high here.)
    - `k2`, `k3`: kept while d^2 / 2, or exp(d) - 1 - d, is at most high: of the token, their sum over the sequence,
      their mean over it ("geometric"), or the largest in it ("max"). Neither is ever negative, so that what points up
      in one token and down in another does not cancel, as it does in the ratio of a sequence.

    Masked importance sampling (MIS) is this with k1 times `importance_weights`. OpenRLHF's seq-mask-tis promises to
    clamp the latter and forgets it; here they are two functions, and each does what its name has.

    Source: Schulman 2020, "Approximating KL Divergence", for the estimators; verl's rollout correction for rejecting
    by them. k3 has verl's sign: its mean over tokens that q sampled is KL(q, p).

    Args:
        logprob_N: [N] log p, as in `importance_weights`, like what is not named here.
        level: whose ratio or estimate is compared; that of a sequence goes for all its tokens.
        estimator: one of the three.
        low: k1: the least ratio, at least 0; None for no bound. k2, k3: None, as they are never below 0.
        high: more than 0; k1: the largest ratio, at least low; k2, k3: the largest estimate, nats.

    Returns:
        [N] float32 without gradient: 1, or 0, or NaN where what is tested is NaN; 0 where the policy did not act.

    Raises:
        ValueError: the shapes cannot be, or a name is unknown.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"estimator={estimator!r} is unknown; set one of {', '.join(get_args(Estimator))}")
    least = 0.0 if low is None else low
    d_N = _log_ratios(logprob_N, rollout_logprob_N, action_mask_N, lengths_B)
    if estimator == "k1":
        kept_N = _ratios(d_N, action_mask_N, lengths_B, level)
    else:
        estimate_N = d_N.square() / 2 if estimator == "k2" else _k3(d_N)
        kept_N = _at_level(estimate_N, action_mask_N, lengths_B, level)
    return chosen(action_mask_N, _within(kept_N, least, high))


@torch.no_grad()
def mismatch_metrics(
    logprob_N: Tensor,
    rollout_logprob_N: Tensor,
    action_mask_N: Tensor,
    lengths_B: Tensor,
    *,
    low: float | None = None,
    high: float | None = None,
) -> dict[str, float]:
    """How far the trainer and the engine are apart, over the whole batch of a step.

    With w = p / q of a token:

    - `mismatch_kl`: mean of -d, KL(q, p) without bias, of either sign; nats.
    - `mismatch_k3`: mean of exp(d) - 1 - d, KL(q, p) again, never negative; nats.
    - `chi_square_token`: mean of w^2, minus 1; `chi_square_sequence`: the mean over sequences of their ratio squared,
      minus 1. The variance that weights of the level would have.
    - `effective_sample_size`: (sum of w)^2 / (M * sum of w^2), the share of tokens that as many equal weights would be
      worth, above 0 to 1 (Kong 1992); of the ratios as they are, where verl takes the weights that it applies.
    - `outside_share` of tokens with w outside [low, high]; only when a bound is given.

    Args:
        logprob_N: [N] log p, as in `importance_weights`, like what is not named here.
        low: at least 0; None for no bound.
        high: more than 0, at least low; None for no bound.

    Returns:
        The metrics. A NaN that counts makes them NaN. Sequences without an action token do not count; where there is
        no action token at all, everything is 0 and `effective_sample_size` 1.

    Raises:
        ValueError: the shapes cannot be.
    """
    bounds = None if low is None and high is None else (low or 0.0, math.inf if high is None else high)
    d_N = _log_ratios(logprob_N, rollout_logprob_N, action_mask_N, lengths_B)
    # In float64: the squares of weights span more digits than float32 has.
    d_M = d_N[action_mask_N].double()
    if not len(d_M):
        zeros = ["mismatch_kl", "mismatch_k3", "chi_square_token", "chi_square_sequence"]
        empty = dict.fromkeys(zeros if bounds is None else [*zeros, "outside_share"], 0.0)
        return {**empty, "effective_sample_size": 1.0}
    acts_B = sequence_sums(action_mask_N.float(), lengths_B) > 0
    sum_B = sequence_sums(d_N.double(), lengths_B)[acts_B].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    w_M = d_M.exp()
    metrics = {
        "mismatch_kl": -d_M.mean(),
        "mismatch_k3": _k3(d_M).mean(),
        "chi_square_token": torch.expm1(2 * d_M).mean(),
        "chi_square_sequence": torch.expm1(2 * sum_B).mean(),
        # Rounding may take equal weights beyond 1.
        "effective_sample_size": (w_M.sum().square() / (len(w_M) * w_M.square().sum())).clamp(max=1.0),
    }
    if bounds is not None:
        metrics["outside_share"] = 1.0 - _within(w_M, *bounds).mean()
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


def _log_ratios(logprob_N: Tensor, rollout_logprob_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    check_columns(action_mask_N, logprob_N=logprob_N, rollout_logprob_N=rollout_logprob_N)
    check_lengths(action_mask_N, lengths_B)
    return log_ratio(logprob_N, rollout_logprob_N, action_mask_N)


def _ratios(d_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, level: Level | Largest) -> Tensor:
    return _at_level(d_N, action_mask_N, lengths_B, level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _at_level(x_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, level: Level | Largest) -> Tensor:
    """[N] x, 0 outside the mask, itself, or at each token its sum, mean or maximum over the sequence."""
    if level == "max":
        largest = [x_S.max().expand(len(x_S)) for x_S in x_N.split(lengths_B.tolist()) if len(x_S)]
        return torch.cat([x_N[:0], *largest])
    if level not in get_args(Level):
        raise ValueError(f"level={level!r} is unknown; set one of {', '.join(get_args(Level))}")
    if level == "token":
        return x_N
    of_B = sequence_sums(x_N, lengths_B) if level == "sequence" else sequence_means(x_N, action_mask_N, lengths_B)
    return spread(of_B, lengths_B, len(x_N))


def _k3(d: Tensor) -> Tensor:
    # expm1 keeps the digits that exp(d) - 1 loses while p and q are close; rounding must not take it below 0.
    return (torch.expm1(d) - d).clamp(min=0.0)


def _beyond(x: Tensor, low: float, high: float) -> Tensor:
    # Asked this way round, NaN is not beyond, and stays to be seen.
    return (x < low) | (x > high)


def _within(x: Tensor, low: float, high: float) -> Tensor:
    """1 where x is within the bounds, 0 where it is not, NaN where it is NaN."""
    return torch.where(_beyond(x, low, high), 0.0, torch.where(x.isnan(), x, 1.0))

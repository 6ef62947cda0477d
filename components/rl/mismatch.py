"""Mismatch of the probabilities of an engine and the trainer.

Shape suffixes: B sequences; N all tokens of a batch end to end; M action tokens among them.

For each token, p is its probability in the trainer, q its probability in the engine that sampled it, and
d = log p - log q in nats, clamped to +-20.
"""

import math

import torch
from torch import Tensor

from components.rl.masked import LOG_RATIO_LIMIT, check_columns, check_lengths, log_ratio, sequence_sums


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
    """Return metrics of the mismatch between trainer and engine, over the complete batch of a step.

    With w = p / q of a token:

    - `mismatch_kl`: mean of -d in nats, an unbiased estimate of KL(q, p). It may be negative.
    - `mismatch_k3`: mean of exp(d) - 1 - d in nats, another estimate of KL(q, p). It is never negative.
    - `chi_square_token`: mean of w^2, minus 1. `chi_square_sequence`: mean of the squared ratio of each sequence, minus
      1. They are the variance of importance weights at that level.
    - `effective_sample_size`: (sum of w)^2 / (M * sum of w^2), the effective share of the tokens, above 0 and at most 1
      (Kong 1992). It uses the unbounded ratios; verl uses the weights that it applies.
    - `outside_share`: share of tokens with w outside [low, high]. Only with a bound.

    Args:
        logprob_N: [N] log p, as in components/rl/correction.py, like all arguments that are not listed here.
        low: lower bound of w, at least 0; None for no bound.
        high: upper bound of w, above 0 and at least low; None for no bound.

    Returns:
        The metrics. A NaN inside the mask makes them NaN. Sequences without an action token are not counted. Without
        any action token all metrics are 0, except `effective_sample_size`, which is 1.

    Raises:
        ValueError: shapes differ.
    """
    has_bound = low is not None or high is not None
    d_N = log_ratios(logprob_N, rollout_logprob_N, action_mask_N, lengths_B)
    # In float64: the squares of the weights span more digits than float32 has.
    d_M = d_N[action_mask_N].double()
    if not len(d_M):
        names = ["mismatch_kl", "mismatch_k3", "chi_square_token", "chi_square_sequence"]
        if has_bound:
            names.append("outside_share")
        return {**dict.fromkeys(names, 0.0), "effective_sample_size": 1.0}
    acts_B = sequence_sums(action_mask_N.float(), lengths_B) > 0
    sum_B = sequence_sums(d_N.double(), lengths_B)[acts_B].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    w_M = d_M.exp()
    metrics = {
        "mismatch_kl": -d_M.mean(),
        "mismatch_k3": k3(d_M).mean(),
        "chi_square_token": torch.expm1(2 * d_M).mean(),
        "chi_square_sequence": torch.expm1(2 * sum_B).mean(),
        # Rounding may give slightly more than 1 for equal weights.
        "effective_sample_size": (w_M.sum().square() / (len(w_M) * w_M.square().sum())).clamp(max=1.0),
    }
    if has_bound:
        metrics["outside_share"] = 1.0 - is_within(w_M, low or 0.0, high or math.inf).mean()
    # One device-to-host copy for all metrics.
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


def log_ratios(logprob_N: Tensor, rollout_logprob_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return d [N] of each token."""
    check_columns(action_mask_N, logprob_N=logprob_N, rollout_logprob_N=rollout_logprob_N)
    check_lengths(action_mask_N, lengths_B)
    return log_ratio(logprob_N, rollout_logprob_N, action_mask_N)


def k3(d: Tensor) -> Tensor:
    """Return the estimate k3 of KL(q, p) from d."""
    # expm1 keeps the digits that exp(d) - 1 loses while p and q are close. Rounding must not give a negative estimate.
    return (torch.expm1(d) - d).clamp(min=0.0)


def is_outside(x: Tensor, low: float, high: float) -> Tensor:
    """Return True where x is outside of the bounds."""
    # Comparisons with NaN are False, so a NaN is not beyond the bounds and stays visible in the result.
    return (x < low) | (x > high)


def is_within(x: Tensor, low: float, high: float) -> Tensor:
    """Return 1 where x is within the bounds, 0 where it is not, and NaN where it is NaN."""
    return torch.where(is_outside(x, low, high), 0.0, torch.where(x.isnan(), x, 1.0))

"""The KL divergence between policy and reference: estimators, one sample per token, and the weight that it gets.

N all tokens of a batch end to end.
Source: John Schulman, "Approximating KL Divergence" (2020), which names k1, k2 and k3.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.masked import LOG_RATIO_LIMIT, check_columns, chosen

KLKind = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]

KL_LIMIT = 10.0


def kl_estimate(logprob_N: Tensor, ref_logprob_N: Tensor, action_mask_N: Tensor, kind: KLKind) -> Tensor:
    """KL(policy, reference) of each token in nats, for tokens that the policy sampled.

    With d = log p - log p_ref: k1 = d, without bias, of either sign; k2 = d^2 / 2, biased, its gradient is that of
    the KL; k3 = exp(-d) - 1 + d, without bias, never negative; abs = |d|. As a loss, the gradient of k1 has mean 0 and
    that of k3 is that of KL(reference, policy): a "+" behind the name keeps the value and takes the gradient of k2, d,
    the one that is right in expectation (Tang and Munos 2025, arXiv 2506.09477). So k1 suits rewards; k2 and all "+"
    losses.

    d is kept within +-20, and every estimate within +-10, k1, k2 and abs too, as in OpenRLHF (verl cuts k3 alone).
    Where it is cut its gradient is 0; that of a "+" is 0 only where |d| is beyond 20.

    Args:
        logprob_N: [N] log-probability under the policy, nats.
        ref_logprob_N: [N] the same token under the reference.
        action_mask_N: [N] bool, True where the policy produced the token; elsewhere anything may stand.
        kind: which estimator.

    Returns:
        [N] float32, 0 where the policy did not act.

    Raises:
        ValueError: the shapes differ, or `kind` is unknown.
    """
    check_columns(action_mask_N, logprob_N=logprob_N, ref_logprob_N=ref_logprob_N)
    if kind not in get_args(KLKind):
        raise ValueError(f"KL estimator {kind!r} is unknown; set one of {', '.join(get_args(KLKind))}")
    d_N = chosen(action_mask_N, logprob_N.float() - ref_logprob_N.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    value_N = _estimate(d_N, kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value_N
    slope_N = d_N.square() / 2
    return value_N.detach() + (slope_N - slope_N.detach())


def _estimate(d_N: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        kl_N = d_N
    elif kind == "k2":
        kl_N = d_N.square() / 2
    elif kind == "abs":
        kl_N = d_N.abs()
    else:
        # expm1 keeps the digits that exp(-d) - 1 loses while the policy is still close to the reference.
        kl_N = torch.expm1(-d_N) + d_N
    return kl_N.clamp(-KL_LIMIT, KL_LIMIT)


def adapted_kl_coef(coef: float, kl: float, *, target: float, horizon: float, samples: int) -> float:
    """The weight of the KL after a step whose policy was `kl` away: larger beyond the target, smaller within it.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2: coef (1 + clip(kl / target - 1, -0.2, 0.2) samples /
    horizon). A fixed weight needs no function. With as many samples as five horizons the weight could become 0, from
    where it never comes back, or turn its sign.

    Args:
        coef: weight during the step, at least 0.
        kl: mean KL of the step in nats; per token or per sequence, whatever the target is of.
        target: the KL to stay near, above 0.
        horizon: samples over which the weight may change by at most a fifth of itself.
        samples: responses of the step, fewer than five times the horizon.

    Raises:
        ValueError: the KL is not finite.
    """
    if not math.isfinite(kl):
        raise ValueError(
            f"the KL of the step is {kl}, to which no weight can be adapted; look at its log-probabilities"
        )
    return coef * (1.0 + min(max(kl / target - 1.0, -0.2), 0.2) * samples / horizon)

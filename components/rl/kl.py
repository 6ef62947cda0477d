"""KL divergence between policy and reference: estimators per sampled token, and the adaptive coefficient.

Shape suffix: N all tokens of a batch end to end.
Source: John Schulman, "Approximating KL Divergence" (2020), which names k1, k2 and k3.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.masked import LOG_RATIO_LIMIT, check_columns, chosen

KLKind = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
"""Name of an estimator; see `kl_estimate`."""

KL_LIMIT = 10.0
"""Maximum absolute value of an estimate in nats, as in OpenRLHF."""


def kl_estimate(logprob_N: Tensor, ref_logprob_N: Tensor, action_mask_N: Tensor, kind: KLKind) -> Tensor:
    """Estimate KL(policy, reference) in nats at each token that the policy sampled.

    With d = log p - log p_ref:

    - k1 = d: unbiased, may be negative.
    - k2 = d^2 / 2: biased. Its gradient is that of the KL.
    - k3 = exp(-d) - 1 + d: unbiased, never negative.
    - abs = |d|.

    As a loss, k1 has a gradient of mean 0, and k3 has the gradient of KL(reference, policy). A "+" after the name keeps
    the value and uses the gradient of k2, which is the correct one in expectation (Tang and Munos 2025, arXiv
    2506.09477). k1 is therefore suited to rewards, and k2 and all "+" variants to losses.

    d is clamped to +-20, and every estimate (k1, k2 and abs too) to +-10, as in OpenRLHF. verl clamps only k3. The
    gradient of a clamped estimate is 0; that of a "+" variant is 0 only where |d| is above 20.

    Args:
        logprob_N: [N] log-probability under the policy, nats.
        ref_logprob_N: [N] log-probability of the same token under the reference, nats.
        action_mask_N: [N] bool, True where the policy produced the token. Entries elsewhere may have any value.
        kind: name of the estimator.

    Returns:
        [N] float32, 0 outside the mask.

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
    # The difference below is 0, so the value remains that of `kind`; its gradient is that of k2.
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
    """Return the KL coefficient for the next step: larger if `kl` is above the target, smaller if it is below.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2: coef (1 + clip(kl / target - 1, -0.2, 0.2) samples /
    horizon). With samples of five horizons or more the coefficient could become 0, where it would stay, or negative.

    Args:
        coef: coefficient during the step, at least 0.
        kl: mean KL of the step in nats, per token or per sequence, as the target.
        target: KL to stay near, above 0.
        horizon: number of samples over which the coefficient may change by at most 20 %.
        samples: number of responses of the step, fewer than five times the horizon.

    Raises:
        ValueError: the KL is not finite.
    """
    if not math.isfinite(kl):
        raise ValueError(f"the KL of the step is {kl}, so kl_coef cannot be adapted; check the log-probabilities")
    return coef * (1.0 + min(max(kl / target - 1.0, -0.2), 0.2) * samples / horizon)

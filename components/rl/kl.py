"""Estimators of the KL divergence between policy and reference, one sample per token.

N all tokens of a batch end to end.
Source: John Schulman, "Approximating KL Divergence" (2020), which names them k1, k2 and k3.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]

_KL_LIMIT = 10.0
# Beyond it every estimator is over its limit, and exp would overflow: inf * 0 in the backward pass is NaN.
_LOG_RATIO_LIMIT = 20.0


def kl_estimate(logprob_N: Tensor, ref_logprob_N: Tensor, kind: KLKind) -> Tensor:
    """KL(policy, reference) of each token in nats, for tokens that the policy sampled.

    With d = log p - log p_ref: k1 = d, without bias, of either sign; k2 = d^2 / 2, biased, its gradient is that of
    the KL; k3 = exp(-d) - 1 + d, without bias, never negative. So k1 suits rewards, k2 and k3 suit losses.

    Args:
        logprob_N: [N] log-probability under the policy, nats.
        ref_logprob_N: [N] the same token under the reference.
        kind: which estimator.

    Returns:
        [N] float32, cut to [-10, 10]; where it is cut the gradient is 0.

    Raises:
        ValueError: the shapes differ, or `kind` is none of the three.
    """
    if logprob_N.shape != ref_logprob_N.shape:
        raise ValueError(
            f"logprob_N has shape {list(logprob_N.shape)}, ref_logprob_N {list(ref_logprob_N.shape)}; both must be [N]"
        )
    d_N = (logprob_N.float() - ref_logprob_N.float()).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    if kind == "k1":
        kl_N = d_N
    elif kind == "k2":
        kl_N = d_N.square() / 2
    elif kind == "k3":
        # expm1 keeps the digits that exp(-d) - 1 loses while the policy is still close to the reference.
        kl_N = torch.expm1(-d_N) + d_N
    else:
        raise ValueError(f"KL estimator {kind!r} is unknown; set one of {', '.join(get_args(KLKind))}")
    return kl_N.clamp(-_KL_LIMIT, _KL_LIMIT)

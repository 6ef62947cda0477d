"""Divergences between a student's and a teacher's distribution of the next token.

Shape suffixes: `N` all tokens of a batch end to end, `K` the teacher's most likely next tokens.

The distributions are compared over the K tokens and one further class, the tail, which has the probability of all other
tokens. The result is never above the divergence over the whole vocabulary, and 0 where the two distributions agree on
these K + 1 classes. Probabilities are not renormalised over the K tokens: this would hide how much probability the
student gives to the others.

Sources: Agarwal et al. 2024 (GKD, arXiv 2306.13649), Gu et al. 2024 (MiniLLM, arXiv 2306.08543).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

Divergence = Literal["reverse", "forward", "jsd"]
"""Name of a divergence; see `divergence`."""

FLOOR = -20.0
"""Minimum log-probability of a class, in nats. A teacher that gives a class no probability would make the reverse KL
infinite."""


def with_tail(logprob_NK: Tensor) -> Tensor:
    """Append the log-probability of all other tokens. Return [N, K + 1] in float32, in nats, clamped to `FLOOR`."""
    logprob_NK = logprob_NK.float()
    # Below 1, because rounding may raise the sum to 1 or above if the K tokens are nearly the whole vocabulary.
    listed_N = logprob_NK.exp().sum(-1).clamp(max=1.0 - 1e-6)
    tail_N = torch.log1p(-listed_N)
    return torch.cat([logprob_NK, tail_N[:, None]], dim=-1).clamp(min=FLOOR)


def divergence(student_NK: Tensor, teacher_NK: Tensor, kind: Divergence, beta: float = 0.5) -> Tensor:
    """Return a divergence between teacher q and student p at each token, [N] float32, in nats.

    - `reverse`: KL(p, q) = sum p (log p - log q). It makes the student choose among the teacher's tokens.
    - `forward`: KL(q, p) = sum q (log q - log p). It makes the student cover all of the teacher's tokens.
    - `jsd`: beta KL(q, m) + (1 - beta) KL(p, m), with m = beta q + (1 - beta) p (GKD, equation 1).

    Args:
        student_NK: [N, K] log-probabilities of the teacher's K most likely tokens under the student. Has the gradient.
        teacher_NK: [N, K] log-probabilities of the same tokens under the teacher.
        kind: name of the divergence.
        beta: weight of the teacher in the mixture of `jsd`, between 0 and 1.

    Raises:
        ValueError: the shapes differ, or `kind` is unknown.
    """
    if student_NK.shape != teacher_NK.shape or student_NK.dim() != 2:
        raise ValueError(
            f"student_NK has shape {list(student_NK.shape)}, teacher_NK {list(teacher_NK.shape)}; both must be [N, K]"
        )
    if kind not in get_args(Divergence):
        raise ValueError(f"divergence {kind!r} is unknown; set one of {', '.join(get_args(Divergence))}")
    student_NC = with_tail(student_NK)
    teacher_NC = with_tail(teacher_NK.detach())
    if kind == "reverse":
        return _kl(student_NC, teacher_NC)
    if kind == "forward":
        return _kl(teacher_NC, student_NC)
    mixture_NC = (beta * teacher_NC.exp() + (1 - beta) * student_NC.exp()).log()
    return beta * _kl(teacher_NC, mixture_NC) + (1 - beta) * _kl(student_NC, mixture_NC)


def _kl(logprob_NC: Tensor, other_NC: Tensor) -> Tensor:
    return (logprob_NC.exp() * (logprob_NC - other_NC)).sum(-1)

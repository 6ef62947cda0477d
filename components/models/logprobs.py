"""Log-probabilities and entropies from logits, with little memory besides the logits.

Logits are the largest tensor in memory: 16,384 tokens and a vocabulary of 151,936 take 10 GB in float32. They are
therefore read in chunks of rows, and only their gradient is as large.

Legend: `R` rows of logits, `V` vocabulary, `M` rows that have a label, `N` rows among them with a nonzero gradient, `K`
rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Number of logits of a chunk by device type. On a CPU a chunk fits into the cache of a core. On a GPU it has hundreds
# of rows of a large vocabulary, because a GPU computes that many at the same time.
_CHUNK_ELEMENTS = {"cpu": 2**18}
_DEFAULT_CHUNK_ELEMENTS = 2**26

# Finite replacement of -inf: its exp is 0 in float32 and in float64, and 0 times it is 0, whereas 0 * -inf is NaN.
NO_CHANCE = -1000.0


def label_logprobs(
    logits_RV: Tensor, row_M: Tensor, label_M: Tensor, scale: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each label under softmax(logits / scale) of its row, and the entropy of the row.

    With x = logits / scale, p = softmax(x) and H = -sum_j p_j log p_j, where a logit of -inf adds nothing to H:

        d log p_label / d logit_j = (1[j = label] - p_j) / scale
        d H / d logit_j = -p_j (log p_j + H) / scale

    On a CPU, a row whose log-probability and entropy both have a gradient of 0 is not read in the backward pass. Its
    gradient is 0 even if it contains NaN.

    Args:
        logits_RV: [R, V] of any floating dtype. Computations are in float32, or in float64 for float64 logits.
        row_M: [M] integers, row of each label. With gradients, no row may occur twice.
        label_M: [M] int64 in 0 to V - 1.
        scale: sampling temperature, positive.
        with_entropy: also compute the entropy.

    Returns:
        [M] log-probabilities in nats, and [M] entropies in nats or None; float32, or float64 for float64 logits.

    Raises:
        ValueError: scale is not positive, or, in the backward pass on a CPU, a row has two labels.
    """
    check_scale(scale)
    return _LabelLogprobs.apply(logits_RV, row_M, label_M, scale, with_entropy)


def check_scale(scale: float) -> None:
    """Raise a ValueError unless the temperature is positive."""
    if not scale > 0:
        raise ValueError(f"scale={scale}: logits are divided by it; set a positive number")


def read_logits(
    logits_RV: Tensor, row_M: Tensor, label_M: Tensor, scale: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the results of `label_logprobs` without a graph."""
    scratch = Scratch(logits_RV, len(row_M))
    logprob_M = scratch.first_KV.new_empty(len(row_M))
    entropy_M = torch.empty_like(logprob_M) if with_entropy else None
    for chunk in scratch.chunks(len(row_M)):
        logits_KV = scratch.load(logits_RV, row_M[chunk], scale)
        logprob_KV = torch.log_softmax(logits_KV, -1, out=scratch.second_KV[: len(logits_KV)])
        logprob_M[chunk] = logprob_KV.gather(1, label_M[chunk, None]).squeeze(1)
        if entropy_M is not None:
            probability_KV = torch.exp(logprob_KV.clamp_(min=NO_CHANCE), out=logits_KV)
            entropy_M[chunk] = -probability_KV.mul_(logprob_KV).sum(-1)
    return logprob_M, entropy_M


def write_gradient(
    logits_RV: Tensor,
    target_RV: Tensor,
    row_N: Tensor,
    label_N: Tensor,
    scale: float,
    logprob_grad_N: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    label_grad_N: Tensor | None = None,
    log_total_N: Tensor | None = None,
) -> None:
    """Write the gradient of these rows of logits into the same rows of `target_RV`, which may be the logits.

    Args:
        logits_RV: [R, V].
        target_RV: [R, V] of the same dtype.
        row_N: [N] int64, no row twice.
        label_N: [N] int64, label of each row.
        scale: sampling temperature.
        logprob_grad_N: [N] gradients of the labels' log-probabilities.
        entropy: [N] gradients of the rows' entropies, and [N] the entropies; None: they have no gradient.
        label_grad_N: [N] gradients of the labels' logits, if another rank has the logits of some labels: 0 for these,
            else `logprob_grad_N`. None: the rows are whole.
        log_total_N: [N] logarithms of the sums of exp(logit / scale) over the whole vocabulary. None: the rows are
            whole.
    """
    scratch = Scratch(logits_RV, len(row_N))
    label_grad_N = (logprob_grad_N if label_grad_N is None else label_grad_N) / scale
    for chunk in scratch.chunks(len(row_N)):
        row_K, logprob_grad_K = row_N[chunk], logprob_grad_N[chunk] / scale
        logits_KV = scratch.load(logits_RV, row_K, scale)
        grad_KV = scratch.second_KV[: len(logits_KV)]
        log_total_K = None if log_total_N is None else log_total_N[chunk]
        if entropy is None:
            _softmax(logits_KV, grad_KV, log_total_K).mul_(-logprob_grad_K[:, None])
        else:
            # -p (a + b (log p + H)), where a and b are the gradients of log-probability and entropy.
            entropy_grad_K = entropy[0][chunk] / scale
            offset_K = logprob_grad_K + entropy_grad_K * entropy[1][chunk]
            logprob_KV = _log_softmax(logits_KV, grad_KV, log_total_K).clamp_(min=NO_CHANCE)
            probability_KV = torch.exp(logprob_KV, out=logits_KV)
            logprob_KV.mul_(-entropy_grad_K[:, None]).sub_(offset_K[:, None]).mul_(probability_KV)
        grad_KV.scatter_add_(1, label_N[chunk, None], label_grad_N[chunk, None])
        scratch.store(grad_KV, target_RV, row_K)


def _softmax(logits_KV: Tensor, out_KV: Tensor, log_total_K: Tensor | None) -> Tensor:
    """Compute the softmax into `out_KV`. `log_total_K`: see `write_gradient`."""
    if log_total_K is None:
        return torch.softmax(logits_KV, -1, out=out_KV)
    return _log_softmax(logits_KV, out_KV, log_total_K).exp_()


def _log_softmax(logits_KV: Tensor, out_KV: Tensor, log_total_K: Tensor | None) -> Tensor:
    if log_total_K is None:
        return torch.log_softmax(logits_KV, -1, out=out_KV)
    return torch.sub(logits_KV, log_total_K[:, None], out=out_KV)


def gradients_that_count(
    logprob_grad_M: Tensor | None, entropy_grad_M: Tensor | None, entropy_M: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None] | None:
    """Select the M gradients that are not 0, or on a GPU all of them. NaN counts as not 0.

    Returns:
        [N] indices, and the arguments `logprob_grad_N` and `entropy` of `write_gradient`; None without any gradient.
    """
    if logprob_grad_M is None and entropy_grad_M is None:
        return None
    grads = [grad_M for grad_M in (logprob_grad_M, entropy_grad_M) if grad_M is not None]
    index_N = torch.arange(len(grads[0]), device=grads[0].device)
    # A GPU would make the host wait for the number of gradients that are not 0.
    if index_N.device.type == "cpu":
        index_N = index_N[torch.stack(grads).any(0)]
    logprob_grad_M = torch.zeros_like(grads[0]) if logprob_grad_M is None else logprob_grad_M
    if entropy_grad_M is None or entropy_M is None:
        return index_N, logprob_grad_M[index_N], None
    return index_N, logprob_grad_M[index_N], (entropy_grad_M[index_N], entropy_M[index_N])


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, row_M: Tensor, label_M: Tensor, scale: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprob_M, entropy_M = read_logits(logits_RV, row_M, label_M, scale, with_entropy)
        ctx.save_for_backward(logits_RV, row_M, label_M, entropy_M)
        ctx.set_materialize_grads(False)
        ctx.scale = scale
        return logprob_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator's type loses ctx
        ctx: Any, logprob_grad_M: Tensor | None, entropy_grad_M: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        logits_RV, row_M, label_M, entropy_M = ctx.saved_tensors
        gradients = gradients_that_count(logprob_grad_M, entropy_grad_M, entropy_M)
        if gradients is None:
            return None, None, None, None, None
        index_N, logprob_grad_N, entropy = gradients
        row_N = row_M[index_N]
        if row_N.device.type == "cpu" and len(row_N.unique()) < len(row_N):
            raise ValueError("row_M names a row of the logits twice, and both its labels get a gradient; give it one")
        grad_RV = torch.zeros_like(logits_RV)
        write_gradient(logits_RV, grad_RV, row_N, label_M[index_N], ctx.scale, logprob_grad_N, entropy)
        return grad_RV, None, None, None, None


class Scratch:
    """Buffers for two copies of a chunk of rows, which are reused for each chunk.

    When they were allocated anew for each chunk, the process grew by one to two times the size of the logits, because
    malloc did not reuse the freed blocks.
    """

    def __init__(self, logits_RV: Tensor, num_rows: int) -> None:
        elements = _CHUNK_ELEMENTS.get(logits_RV.device.type, _DEFAULT_CHUNK_ELEMENTS)
        self.size = max(1, elements // max(1, logits_RV.shape[1]))
        shape = min(self.size, num_rows), logits_RV.shape[1]
        dtype = torch.promote_types(logits_RV.dtype, torch.float32)
        self.first_KV, self.second_KV = (logits_RV.new_empty(shape, dtype=dtype) for _ in range(2))
        # A third buffer in the dtype of the logits, if the computation has another dtype.
        self.stored_KV = None if dtype == logits_RV.dtype else logits_RV.new_empty(shape)

    def chunks(self, num_rows: int) -> list[slice]:
        """Return the slices of rows that are processed together."""
        return [slice(start, start + self.size) for start in range(0, num_rows, self.size)]

    def load(self, logits_RV: Tensor, row_K: Tensor, scale: float) -> Tensor:
        """Copy rows to `first_KV`, in at least float32, divide them by the temperature and return them, [K, V]."""
        logits_KV = self.first_KV[: len(row_K)]
        if self.stored_KV is None:
            torch.index_select(logits_RV, 0, row_K, out=logits_KV)
        else:
            logits_KV.copy_(torch.index_select(logits_RV, 0, row_K, out=self.stored_KV[: len(row_K)]))
        return logits_KV if scale == 1.0 else logits_KV.div_(scale)

    def store(self, grad_KV: Tensor, target_RV: Tensor, row_K: Tensor) -> None:
        """Write a chunk to these rows of the target, which has the dtype of the logits."""
        if self.stored_KV is not None:
            grad_KV = self.stored_KV[: len(row_K)].copy_(grad_KV)
        target_RV.index_copy_(0, row_K, grad_KV)

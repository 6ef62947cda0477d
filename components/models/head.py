"""Log-probabilities and entropies from hidden states, with the output layer applied chunk by chunk.

The logits of all tokens are never held in memory. Each chunk is computed, read, and recomputed in the backward pass.

Legend: `M` states that have a label, `N` states among them with a nonzero gradient, `K` states of a chunk, `H` hidden
size, `V` vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from components.models.logprobs import check_scale, gradients_that_count
from components.models.vocabulary import WHOLE_VOCABULARY, Vocabulary, vocabulary_of

# Maximum number of logits of a chunk, and minimum number of rows, by device type. The softmax has smaller chunks of its
# own. Matrix products need many rows to be efficient, above all the product that is added to the gradient of the
# weights.
_CHUNK = {"cpu": (2**24, 256)}
_DEFAULT_CHUNK = (2**27, 512)

_MARK = "logprobs_from_states"


def mark_plain_head(model: nn.Module, is_plain: bool) -> None:
    """Store the result of `has_plain_head` in a causal language model. It may be that of another model of its kind."""
    setattr(model, _MARK, is_plain)


def has_plain_head(model: nn.Module) -> bool:
    """Return True if the logits of a causal language model are the unchanged outputs of its output layer.

    Some models cap or scale the logits, or cut a padded vocabulary; for these, whole logits must be computed. The test
    calls the model with one token while its output layer returns known numbers. The model must have its whole weights.
    """
    head = _head(model)
    if head is None:
        return False
    next_11V = torch.randn(1, 1, head.out_features, generator=torch.Generator().manual_seed(0)).to(head.weight)
    with torch.no_grad(), replaced_forward(head, lambda _: next_11V):
        logits_11V = model(input_ids=head.weight.new_zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    return logits_11V.shape == next_11V.shape and torch.equal(logits_11V, next_11V)


def plain_head(model: nn.Module) -> nn.Linear | None:
    """Return the output layer of a model (or of the model in an engine) that `mark_plain_head` marked; otherwise
    None.
    """
    # The layer is looked up anew, because adapters may have replaced it since.
    return _head(model) if getattr(model, _MARK, False) else None


@contextlib.contextmanager
def logprobs_for_logits(
    head: nn.Linear, row_M: Tensor, label_M: Tensor, scale: float, with_entropy: bool
) -> Iterator[None]:
    """Context manager in which the model with this output layer returns the results of `state_logprobs` in place of its
    logits, as a tensor of shape [1, M, 1 or 2].

    The layer is still called as a module, so that the hooks of sharded weights gather them.

    Args:
        head: output layer, from `plain_head`.
        row_M: [M] int64, index of each label's state among the inputs of the layer.
        label_M: as in `state_logprobs`, like the other arguments.
        scale: see `state_logprobs`.
        with_entropy: see `state_logprobs`.
    """
    vocabulary = vocabulary_of(head)

    def forward(state_BTH: Tensor) -> Tensor:
        state_MH = state_BTH.flatten(0, -2).index_select(0, row_M)
        with vocabulary.weights(head) as (weight_VH, bias_V):
            logprob_M, entropy_M = state_logprobs(state_MH, weight_VH, bias_V, label_M, scale, with_entropy, vocabulary)
        # The result is not a view of [M, 2], because a view would lose the hooks that fully_shard puts on the output.
        return torch.stack([x_M[None] for x_M in (logprob_M, entropy_M) if x_M is not None], dim=-1)

    with replaced_forward(head, forward):
        yield


def state_logprobs(
    state_MH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    label_M: Tensor,
    scale: float,
    with_entropy: bool,
    vocabulary: Vocabulary = WHOLE_VOCABULARY,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each label under softmax((W h + b) / scale), and the entropy of that distribution.

    Logits have the dtype of the weights, or that of autocast. All later computations, and the sums over chunks in the
    gradient of the weights, are float32, or float64 for float64 logits. If one chunk holds all logits (2^24 on a CPU,
    or 256 rows), they are kept for the backward pass, which is faster.

    Args:
        state_MH: [M, H] inputs of the output layer.
        weight_VH: [V, H] weight of the output layer.
        bias_V: [V] bias of the output layer, or None.
        label_M: [M] int64 in 0 to V - 1.
        scale: sampling temperature, positive.
        with_entropy: also compute the entropy.
        vocabulary: vocabulary of the layer, from `vocabulary_of`. Default: the weights cover the whole vocabulary.

    Returns:
        [M] log-probabilities in nats, and [M] entropies in nats or None.

    Raises:
        ValueError: scale is not positive.
    """
    check_scale(scale)
    return _StateLogprobs.apply(state_MH, weight_VH, bias_V, label_M, scale, with_entropy, vocabulary)


class _StateLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        state_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        label_M: Tensor,
        scale: float,
        with_entropy: bool,
        vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor | None]:
        device = state_MH.device.type
        autocasts = torch.is_autocast_enabled(device) and weight_VH.dtype == torch.float32
        ctx.dtype = torch.get_autocast_dtype(device) if autocasts else weight_VH.dtype
        ctx.scale, ctx.kept, ctx.vocabulary = scale, None, vocabulary
        results = []
        head = _cast(ctx.dtype, weight_VH, bias_V)
        # `split` gives one empty chunk if there is no state, so there is always a result.
        ctx.rows = _chunk_rows(weight_VH, vocabulary)
        chunks = label_M.split(ctx.rows)
        for state_KH, label_K in zip(state_MH.split(ctx.rows), chunks, strict=True):
            with torch.autocast(device, enabled=False):
                logits_KV = linear(state_KH.to(ctx.dtype), *head)
            results.append(vocabulary.read(logits_KV, label_K, scale, with_entropy))
            # A single chunk fits into memory anyway, so keeping its logits saves the recomputation.
            if len(chunks) == 1 and any(ctx.needs_input_grad):
                ctx.kept = logits_KV
            del logits_KV  # otherwise it would be in memory together with the next chunk
        columns: Any = [None if parts[0] is None else torch.cat(parts) for parts in zip(*results, strict=True)]
        logprob_M, entropy_M, log_total_M = columns
        ctx.save_for_backward(state_MH, weight_VH, bias_V, label_M, entropy_M, log_total_M)
        ctx.set_materialize_grads(False)
        return logprob_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator's type loses ctx
        ctx: Any, logprob_grad_M: Tensor | None, entropy_grad_M: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        state_MH, weight_VH, bias_V, label_M, entropy_M, log_total_M = ctx.saved_tensors
        gradients = gradients_that_count(logprob_grad_M, entropy_grad_M, entropy_M)
        if gradients is None:
            return None, None, None, None, None, None, None
        index_N, logprob_grad_N, entropy = gradients
        needs_grad, wide = ctx.needs_input_grad, logprob_grad_N.dtype
        state_grad_MH = torch.zeros_like(state_MH) if needs_grad[0] else None
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=wide) if needs_grad[1] else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=wide) if needs_grad[2] else None
        head = _cast(ctx.dtype, weight_VH, bias_V)
        for start in range(0, len(index_N), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            index_K = index_N[chunk]
            state_KH = state_MH[index_K].to(ctx.dtype)
            grad_KV = linear(state_KH, *head) if ctx.kept is None else ctx.kept[index_K]
            entropy_K = None if entropy is None else (entropy[0][chunk], entropy[1][chunk])
            log_total_K = None if log_total_M is None else log_total_M[index_K]
            ctx.vocabulary.write_gradient(
                grad_KV, label_M[index_K], ctx.scale, logprob_grad_N[chunk], entropy_K, log_total_K
            )
            if state_grad_MH is not None:
                state_grad_MH[index_K] = (grad_KV @ head[0]).to(state_MH.dtype)
            if weight_grad_VH is not None:
                ctx.vocabulary.add_weight_gradient(weight_grad_VH, grad_KV, state_KH)
            if bias_grad_V is not None:
                bias_grad_V += grad_KV.sum(0, dtype=wide)
            del grad_KV
        if state_grad_MH is not None:
            state_grad_MH = ctx.vocabulary.sum_state_gradient(state_grad_MH)
        return state_grad_MH, weight_grad_VH, bias_grad_V, None, None, None, None


def _chunk_rows(weight_VH: Tensor, vocabulary: Vocabulary) -> int:
    elements, rows = _CHUNK.get(weight_VH.device.type, _DEFAULT_CHUNK)
    return max(rows, vocabulary.chunk_factor * elements // max(1, len(weight_VH)))


def _cast(dtype: torch.dtype, weight_VH: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)


def _head(model: nn.Module) -> nn.Linear | None:
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find and find()
    return head if type(head) is nn.Linear else None


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Context manager in which `forward` replaces the forward method of a module. Its hooks still run."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before

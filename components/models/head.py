"""Log-probabilities and entropies from hidden states: the output layer and what is made of its logits, chunk by chunk.

The logits of all tokens never exist. A chunk of them is computed, read, and computed again in the backward pass.

Legend: `M` states that have a label, `N` those of them whose gradient is not 0, `K` those of a chunk, `H` numbers of a
state, `V` vocabulary.
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

# Logits of one chunk, and rows at least, by kind of device. What is made of the logits has smaller chunks of its own,
# but matrix products want many rows, most of all the one that is added to the gradient of the weights.
_CHUNK = {"cpu": (2**24, 256)}
_DEFAULT_CHUNK = (2**27, 512)

_MARK = "logprobs_from_states"


def mark_plain_head(model: nn.Module, is_plain: bool) -> None:
    """Note at a causal language model what `has_plain_head` found of it, or of another of its kind."""
    setattr(model, _MARK, is_plain)


def has_plain_head(model: nn.Module) -> bool:
    """Find out whether the logits of a causal language model are what its output layer gives, unchanged.

    Some cap or scale them, or cut a padded vocabulary: their logits are read as a whole. The model is asked with one
    token, while it has its whole weights: the layer is made to answer with known numbers.
    """
    head = _head(model)
    if head is None:
        return False
    next_11V = torch.randn(1, 1, head.out_features, generator=torch.Generator().manual_seed(0)).to(head.weight)
    with torch.no_grad(), _forward_of(head, lambda _: next_11V):
        logits_11V = model(input_ids=head.weight.new_zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    return logits_11V.shape == next_11V.shape and torch.equal(logits_11V, next_11V)


def plain_head(model: nn.Module) -> nn.Linear | None:
    """The output layer of a model, or of the model in an engine, whose logits `mark_plain_head` found unchanged."""
    # Adapters may have replaced it since.
    return _head(model) if getattr(model, _MARK, False) else None


@contextlib.contextmanager
def logprobs_for_logits(
    head: nn.Linear, row_M: Tensor, label_M: Tensor, scale: float, with_entropy: bool
) -> Iterator[None]:
    """Inside, the model that has this output layer returns as its logits what `state_logprobs` gives, [1, M, 1 or 2].

    The layer is still called as a module, so that whoever partitions its weights gathers them.

    Args:
        head: as `plain_head` returns it.
        row_M: [M] int64, the place of each label's state among all that the layer is given.
        label_M: as in `state_logprobs`, like the other arguments.
    """
    vocabulary = vocabulary_of(head)

    def forward(state_BTH: Tensor) -> Tensor:
        state_MH = state_BTH.flatten(0, -2).index_select(0, row_M)
        with vocabulary.weights(head) as (weight_VH, bias_V):
            logprob_M, entropy_M = state_logprobs(state_MH, weight_VH, bias_V, label_M, scale, with_entropy, vocabulary)
        # Not a view of [M, 2]: the hooks that fully_shard puts on a model's output get lost when it is one.
        return torch.stack([x_M[None] for x_M in (logprob_M, entropy_M) if x_M is not None], dim=-1)

    with _forward_of(head, forward):
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
    """Log-probability of each label under softmax((W h + b) / scale), and the entropy of that distribution.

    Logits have the dtype of the weights, or autocast's; what follows is float32, or float64 if they are, as are the
    sums over chunks in the gradient of the weights. Where one chunk holds them all (2^24 on a CPU, or 256 rows), they
    are kept for the backward pass, which is faster.

    Args:
        state_MH: [M, H] what the output layer is given.
        weight_VH: [V, H] of that layer.
        bias_V: [V], or None.
        label_M: [M] int64 in 0 to V - 1.
        scale: the temperature, positive.
        with_entropy: also give the entropy.
        vocabulary: of the layer, as `vocabulary_of` returns it; default: the weights are those of the whole vocabulary.

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
        logprobs, entropies, log_totals = [], [], []
        head = _cast(ctx.dtype, weight_VH, bias_V)
        # One where there is no state, so that the lists are not empty.
        chunks = label_M.split(_chunk_rows(weight_VH))
        for state_KH, label_K in zip(state_MH.split(_chunk_rows(weight_VH)), chunks, strict=True):
            with torch.autocast(device, enabled=False):
                logits_KV = linear(state_KH.to(ctx.dtype), *head)
            logprob_K, entropy_K, log_total_K = vocabulary.read(logits_KV, label_K, scale, with_entropy)
            logprobs.append(logprob_K)
            entropies.append(entropy_K)
            log_totals.append(log_total_K)
            if len(chunks) == 1 and any(ctx.needs_input_grad):
                ctx.kept = logits_KV
        logprob_M = torch.cat(logprobs)
        entropy_M = torch.cat(entropies) if with_entropy else None
        log_total_M = None if log_totals[0] is None else torch.cat(log_totals)
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
        wanted, wide = ctx.needs_input_grad, logprob_grad_N.dtype
        state_grad_MH = torch.zeros_like(state_MH) if wanted[0] else None
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=wide) if wanted[1] else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=wide) if wanted[2] else None
        head = _cast(ctx.dtype, weight_VH, bias_V)
        for start in range(0, len(index_N), _chunk_rows(weight_VH)):
            chunk = slice(start, start + _chunk_rows(weight_VH))
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
            if weight_grad_VH is not None and ctx.dtype == wide:
                weight_grad_VH.addmm_(grad_KV.t(), state_KH)
            elif weight_grad_VH is not None:
                weight_grad_VH += grad_KV.t() @ state_KH
            if bias_grad_V is not None:
                bias_grad_V += grad_KV.sum(0, dtype=wide)
        if state_grad_MH is not None:
            state_grad_MH = ctx.vocabulary.sum_state_gradient(state_grad_MH)
        return state_grad_MH, weight_grad_VH, bias_grad_V, None, None, None, None


def _chunk_rows(weight_VH: Tensor) -> int:
    elements, rows = _CHUNK.get(weight_VH.device.type, _DEFAULT_CHUNK)
    return max(rows, elements // max(1, len(weight_VH)))


def _cast(dtype: torch.dtype, weight_VH: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)


def _head(model: nn.Module) -> nn.Linear | None:
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return head if type(head) is nn.Linear else None


@contextlib.contextmanager
def _forward_of(module: nn.Module, forward: Any) -> Iterator[None]:
    """Inside, `module` computes this, with its hooks."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before

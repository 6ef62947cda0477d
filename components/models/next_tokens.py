"""Log-probabilities of several candidates for each token, from a causal language model.

Legend: `N` all tokens of the batch end to end, `M` tokens that have a predecessor, `S` states of a chunk, `K`
candidates per token, `H` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from components.batch import Batch
from components.models.causal import predecessors
from components.models.head import plain_head, replaced_forward

_CHUNK_ELEMENTS = 2**24
"""Maximum number of logits that are computed at a time."""


def top_logprobs(model: nn.Module, batch: Batch, count: int, temperature: float = 1.0) -> Tensor:
    """Return the most likely candidates for each token, with the log-probability of the token itself.

    Args:
        model: causal language model, or an engine around one. It is called without gradients.
        batch: column `tokens`.
        count: number of candidates K. It must not exceed the size of the vocabulary.
        temperature: sampling temperature, by which logits are divided.

    Returns:
        [N, 1 + 2 K] float32: the log-probability of the token, those of the K candidates in nats, and the K candidates'
        ids, which float32 holds exactly up to 2^24. 0 for the first token of a sequence.
    """

    def read(logprob_SV: Tensor, label_S1: Tensor) -> Tensor:
        top = logprob_SV.topk(count, dim=-1)
        return torch.cat([logprob_SV.gather(1, label_S1), top.values, top.indices.to(logprob_SV.dtype)], dim=-1)

    return _read_next(model, batch, temperature, batch["tokens"][:, None].to(torch.int64), read)


def candidate_logprobs(model: nn.Module, batch: Batch, candidates: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities of given candidates for each token. Gradients flow if they are enabled.

    Args:
        model: causal language model, or an engine around one.
        batch: column `tokens`.
        candidates: [N, K] ids of the candidates for each token.
        temperature: sampling temperature, by which logits are divided.

    Returns:
        [N, K] float32, in nats; 0 for the first token of a sequence.
    """
    return _read_next(
        model, batch, temperature, candidates.to(torch.int64), lambda logprob_SV, ids_SK: logprob_SV.gather(1, ids_SK)
    )


def _read_next(
    model: nn.Module,
    batch: Batch,
    temperature: float,
    ids_NK: Tensor,
    read: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Apply `read` to the log-probabilities [S, V] and the rows of `ids_NK` of each chunk of tokens."""
    call = predecessors(model, batch)
    ids_MK = ids_NK[call.follower_M]
    head = plain_head(model)

    def read_states(state_SH: Tensor, ids_SK: Tensor, *weights: Tensor | None) -> Tensor:
        logits_SV = state_SH
        if weights:
            weight_VH, bias_V = weights
            assert weight_VH is not None
            logits_SV = linear(state_SH.to(weight_VH.dtype), weight_VH, bias_V)
        return read(torch.log_softmax(logits_SV.float() / (temperature or 1.0), -1), ids_SK)

    def read_all(state_MH: Tensor, vocabulary: int, *weights: Tensor | None) -> Tensor:
        rows = max(1, _CHUNK_ELEMENTS // vocabulary)
        # Each chunk is computed again in the backward pass, so that the logits of all tokens are never held in memory.
        parts = [
            checkpoint(read_states, state_SH, ids_SK, *weights, use_reentrant=False)
            for state_SH, ids_SK in zip(state_MH.split(rows), ids_MK.split(rows), strict=True)
        ]
        return torch.cat(parts)

    def head_forward(state_BTH: Tensor) -> Tensor:
        assert head is not None
        state_MH = state_BTH.flatten(0, -2).index_select(0, call.state_M)
        return read_all(state_MH, head.out_features, head.weight, head.bias)[None]

    if head is None:
        logits_RV = model(**call.inputs).logits.flatten(0, 1)
        result_MC = read_all(logits_RV.index_select(0, call.state_M), logits_RV.shape[-1])
    else:
        with replaced_forward(head, head_forward):
            result_MC = model(**call.inputs).logits[0]
    return result_MC.new_zeros(batch.num_tokens, result_MC.shape[1]).index_copy(0, call.follower_M, result_MC)

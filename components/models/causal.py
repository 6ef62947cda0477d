"""Causal language models over ragged batches: log-probabilities of tokens.

Legend: `B` sequences, `T` length of the longest sequence, `N` all tokens of the batch end to end, `M = N - B` tokens
that have a predecessor, `U` positions of a row in which sequences share their common prefix, `E` entries that are read
from the row, `V` vocabulary.

Indices are computed on the CPU from `Batch.host` and sent to the device of the batch, because the host waits for each
number that it reads from a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.batch.ragged import sent
from components.models.head import logprobs_for_logits, plain_head
from components.models.logprobs import label_logprobs
from components.models.packing.layout import layout_of
from components.models.packing.packed_model import called, packed_inputs
from components.models.packing.row_slices import row_slices


@dataclass(frozen=True)
class TokenOutput:
    """Log-probabilities and entropies of the tokens of a batch."""

    logprob_N: Tensor
    """[N] float32, in nats; 0 for the first token of a sequence."""
    entropy_N: Tensor | None
    """[N] float32, in nats, entropy of the distribution from which the token was sampled, or None."""


def token_logprobs(
    model: nn.Module, batch: Batch, temperature: float = 1.0, with_entropy: bool = False, mask: str | None = None
) -> TokenOutput:
    """Return the log-probability of each token of `batch` given the tokens before it.

    It is computed from the inputs of the output layer, so that the logits of all tokens are never held in memory. Whole
    logits are computed if the model changes them, if the output layer has an adapter, and if the model was not loaded
    by `load_policy`.

    Args:
        model: causal language model, or an engine around one. Gradients flow if they are enabled.
        batch: column `tokens`. The batch should be one micro-batch, because it is not split here.
        temperature: sampling temperature, by which logits are divided. 0 (greedy) counts as 1.
        with_entropy: also compute the entropy, which costs a second pass over the logits.
        mask: column of the tokens that the caller reads, which saves the logits of the others: those may be 0 and have
            no gradient. None: all tokens.
    """
    slices = row_slices(model)
    # If whole logits are read, or ranks share the row, each position can be read only once.
    one_follower = slices.is_sliced or plain_head(model) is None
    call = predecessors(model, batch, one_follower=one_follower)
    host, places, send = batch.host, call.inputs["input_ids"].numel(), partial(sent, device=batch.lengths.device)
    state_E, follower_M, entry_M = call.state_M, call.follower_M, None
    label_E = host["tokens"].to(torch.int64)[follower_M]
    if slices.is_sliced or places < len(state_E):
        state_E, label_E, entry_M = _once_per_place(state_E, label_E, places)
    # Ranks that share a row read all its positions.
    if mask is not None and not slices.is_sliced:
        is_trained_M = host[mask][follower_M].bool()
        follower_M = follower_M[is_trained_M]
        entry_M = is_trained_M.nonzero().squeeze(1) if entry_M is None else entry_M[is_trained_M]
        is_read_E = torch.zeros_like(state_E, dtype=torch.bool).index_fill(0, entry_M, True)
        state_E, label_E, entry_M = state_E[is_read_E], label_E[is_read_E], (is_read_E.cumsum(0) - 1)[entry_M]
    label_S = slices.own_slice(label_E[None])[0]
    labels = send(state_E[: len(label_S)]), send(label_S)
    logprob_S, entropy_S = _read(model, slices.own_inputs(call.inputs), *labels, temperature or 1.0, with_entropy)

    def of_tokens(x_S: Tensor) -> Tensor:
        x_M = slices.gather(x_S, places)
        if entry_M is not None:
            x_M = x_M[send(entry_M)]
        return scatter(x_M, send(follower_M), batch.num_tokens)

    return TokenOutput(of_tokens(logprob_S), None if entropy_S is None else of_tokens(entropy_S))


def _once_per_place(place_M: Tensor, label_M: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return entries that read each position of a row once, although several tokens may follow it.

    Each position has one label. If sequences continue differently after it, its further labels are entries after all
    positions.

    Returns:
        [E] positions; [E] their labels; [M] index of the entry of each of the M pairs of position and label.
    """
    place_U = torch.arange(places, device=place_M.device)
    label_U = torch.zeros_like(place_U).scatter_(0, place_M, label_M)
    is_other_M = label_U[place_M] != label_M
    place_E, label_E = torch.cat([place_U, place_M[is_other_M]]), torch.cat([label_U, label_M[is_other_M]])
    behind = torch.arange(places, len(place_E), device=place_M.device)
    return place_E, label_E, place_M.masked_scatter(is_other_M, behind)


def _read(
    model: nn.Module, inputs: dict[str, Any], state_M: Tensor, label_M: Tensor, scale: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Call the model. Return [M] log-probabilities of the labels after these states, and [M] entropies or None."""
    head = plain_head(model)
    if head is None:
        logits_RV = called(model, inputs).logits.flatten(0, 1)
        return label_logprobs(logits_RV, state_M, label_M, scale=scale, with_entropy=with_entropy)
    with logprobs_for_logits(head, state_M, label_M, scale, with_entropy):
        logprob_M, *entropy_M = called(model, inputs).logits[0].unbind(-1)
    return logprob_M, entropy_M[0] if with_entropy else None


def policy_logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities of `token_logprobs`, [N] float32 in nats."""
    return token_logprobs(model, batch, temperature).logprob_N


class _Call(NamedTuple):
    """Arguments of a model call on the device, and on the CPU the positions in its output of the states before each
    token.
    """

    inputs: dict[str, Any]
    state_M: Tensor
    """[M] int64, index among all states of the state before each token that has a predecessor."""
    follower_M: Tensor
    """[M] int64, index among all tokens of the tokens that have a predecessor."""


def padded_inputs(tokens_BT: Tensor) -> dict[str, Any]:
    # No attention mask: the padding is on the right, where a causal model's real tokens cannot see it, and
    # without a mask the fast causal kernels apply. No position_ids either: with them transformers looks for
    # packed sequences.
    return {"input_ids": tokens_BT, "use_cache": False}


def predecessors(model: nn.Module, batch: Batch, *, one_follower: bool = False) -> _Call:
    """Return the call that computes the state before each token.

    The last token of a sequence predicts no token of the batch. It is left out if that saves computation.

    Args:
        model: policy or value model, or an engine around one.
        batch: column `tokens`.
        one_follower: see `RowLayout.plan_row`.
    """
    host, device, layout = batch.host, batch.lengths.device, layout_of(model)
    follower_M = (host.positions() > 0).nonzero().squeeze(1)
    if layout.is_packed:
        lengths_B = host.lengths - 1
        before = Batch(lengths_B[lengths_B > 0], {"tokens": host["tokens"][follower_M - 1]})
        if not len(follower_M):
            # The model is called even without tokens. If it is sharded, other ranks would wait for this one otherwise.
            before = Batch.from_rows({"tokens": [[0]]})
        inputs, place_M = packed_inputs(before.to(device), layout, one_follower=one_follower)
        if place_M is None:
            place_M = torch.arange(len(follower_M))
        return _Call(inputs, place_M, follower_M)
    tokens_BT = host.padded("tokens", 0)
    tokens_BT = tokens_BT[:, : max(1, tokens_BT.shape[1] - 1)]
    state_M = padded_places(host, tokens_BT)[follower_M] - 1
    return _Call(padded_inputs(sent(tokens_BT, device)), state_M, follower_M)


def padded_places(batch: Batch, padded_BT: Tensor) -> Tensor:
    """Return the index [N] of each token in the padded batch, flattened."""
    return batch.sequence_ids * padded_BT.shape[1] + batch.positions()


def scatter(x_M: Tensor, follower_M: Tensor, num_tokens: int) -> Tensor:
    return x_M.new_zeros(num_tokens).index_copy(0, follower_M, x_M)

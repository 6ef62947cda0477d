"""Values of states and tokens, from a model with a value head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from components.batch import Batch
from components.batch.ragged import sent
from components.models.causal import padded_inputs, padded_places, predecessors, scatter
from components.models.packing.layout import layout_of
from components.models.packing.packed_model import called, packed_inputs
from components.models.packing.row_slices import row_slices


def token_values(model: nn.Module, batch: Batch) -> Tensor:
    """Return the value of the state before each token, [N] float32; 0 for the first token of a sequence."""
    call = predecessors(model, batch)
    state_M, follower_M = (sent(index, batch.lengths.device) for index in (call.state_M, call.follower_M))
    return scatter(_row_values(model, call.inputs)[state_M], follower_M, batch.num_tokens)


def state_values(model: nn.Module, batch: Batch) -> Tensor:
    """Return the value of the state after each token, [N] float32."""
    layout, host, device = layout_of(model), batch.host, batch.lengths.device
    if layout.is_packed:
        inputs, place_N = packed_inputs(batch, layout)
    else:
        tokens_BT = host.padded("tokens", 0)
        inputs, place_N = padded_inputs(sent(tokens_BT, device)), padded_places(host, tokens_BT)
    value_U = _row_values(model, inputs)
    # Sequences with a common prompt share its positions in the row, so the values are spread to their tokens.
    if place_N is not None:
        value_U = value_U[sent(place_N, device)]
    return value_U


def _row_values(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Return the values of all states of a call, flattened."""
    slices = row_slices(model)
    return slices.gather(called(model, slices.own_inputs(inputs)).flatten(), inputs["input_ids"].numel())

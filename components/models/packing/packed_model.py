"""Packed sequences: they lie end to end in one row, and each attends only to itself, so no padding is computed. With a
plug-in for the row layout, a common prefix of sequences is computed once.

A packing model receives the row, positions that restart with each sequence, and the borders of the sequences, under the
names that transformers uses. Its attention is the function below, for any window, soft cap or sinks of a layer.

    on a GPU, in half precision     torch's variable-length kernel (plugins/packed_attention), if it supports the layer
    else                            sequences of similar length at a time (packed_row.py): torch's SDPA, or plain
                                    tensor functions for soft caps and sinks

Legend: `B` sequences, `N` all their tokens end to end, `U` places of their row, `S` queries and `T` keys of one
sequence, `R` rows of a call, `H` query heads, `K` key heads, `D` size of a head.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from components import registry
from components.batch import Batch
from components.batch.ragged import sent
from components.models.packing.layout import END_TO_END, RowLayout, set_layout
from components.models.packing.packed_row import PackedRow
from components.models.packing.row_slices import WHOLE_ROWS
from components.models.precision import as_multiplied

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)
_has_borders = ContextVar("has_borders", default=False)
"""True during a call whose attention is given the borders of the sequences."""
_NAME = "troupe_packed"

# Maximum difference between a packed sequence and the same sequence alone, relative to the largest output.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def use_packing(model: PreTrainedModel, probe: PreTrainedModel | None = None) -> None:
    """Enable packed sequences in `model`, and set a packed layout.

    The model gets the attention of this file, unless it was loaded with flash attention, which supports packed
    sequences. As a test, the outputs for a small packed row are compared with those for its sequences alone under eager
    attention.

    Args:
        model: model whose attention is replaced.
        probe: model of the same architecture with whole weights, on which the test runs. None: the model itself.

    Raises:
        ValueError: a layer other than attention combines tokens, or the outputs differ.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    attention = model.config._attn_implementation
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise ValueError(_refusal(model, f"it has layers of the kinds {', '.join(sorted(kinds))}"))
    tested = probe or model
    row = _probe_row(tested)
    try:
        tested.set_attn_implementation("eager")
        with torch.no_grad():
            alone = [tested(input_ids=row.select([i])["tokens"][None], use_cache=False)[0] for i in range(len(row))]
        tested.set_attn_implementation(_NAME)
        expected = torch.cat(alone, 1).float()
        distance = _distance(tested, expected, packed_inputs(row)[0])
        model.set_attn_implementation(_NAME)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(_refusal(model, f"it failed on a packed row: {error}")) from error
    if model.config._attn_implementation != _NAME:
        raise ValueError(_refusal(model, "transformers cannot give it another attention"))
    # `not <=` instead of `>`, so that NaN counts as different.
    if not distance <= _TOLERANCE.get(tested.dtype, 1e-3):
        raise ValueError(_refusal(model, f"packed sequences gave other results than alone, {distance:.1g} apart"))
    if attention is not None and "flash" in attention:
        model.set_attn_implementation(attention)
        set_layout(model, END_TO_END)
    else:
        set_layout(model, _layout_for(tested, row, expected))


def _distance(
    model: PreTrainedModel, expected_1NV: Tensor, inputs: dict[str, Any], place_N: Tensor | None = None
) -> float:
    """Return the largest difference of a model's output for a row, relative to the largest expected number."""
    with torch.no_grad():
        actual_1NV = model(**inputs)[0].float()
    actual_1NV = actual_1NV if place_N is None else actual_1NV[:, place_N]
    return float((actual_1NV - expected_1NV).abs().max() / expected_1NV.abs().max())


def _layout_for(model: PreTrainedModel, row: Batch, expected_1NV: Tensor) -> RowLayout:
    """Return the layout of the plug-in that computes shared tokens once, or `END_TO_END` if it changes the outputs."""
    choose = registry.find("row layout", "shared prompts")
    layout = _warn_once() if choose is None else choose(model)
    if layout is None:
        return END_TO_END
    try:
        distance = _distance(model, expected_1NV, *packed_inputs(row, layout))
    except (RuntimeError, TypeError, ValueError) as error:
        _log.info("%s computes each sequence whole: %s", type(model).__name__, error)
        return END_TO_END
    return layout if distance <= _TOLERANCE.get(model.dtype, 1e-3) else END_TO_END


@cache
def _warn_once() -> None:
    _log.warning("no plug-in provides the row layout `shared prompts`: a prompt is computed anew for each sample")


def use_own_attention(model: PreTrainedModel) -> None:
    """Replace the flash attention of a packing model by the attention of this file."""
    model.set_attn_implementation(_NAME)


def packed_inputs(
    batch: Batch, layout: RowLayout = END_TO_END, *, one_follower: bool = False
) -> tuple[dict[str, Any], Tensor | None]:
    """Return the arguments of a model that packs, for column `tokens` of at least one token.

    Args:
        batch: batch of the sequences.
        layout: layout of the model.
        one_follower: see `RowLayout.plan_row`.

    Returns:
        Arguments of the call on the device of the batch; and on the CPU [N] int64 place of each token in the row, or
        None if the tokens are in order.
    """
    # Indices are computed on the CPU: a GPU would make the host wait for each number that it reads.
    plan, packed = layout.plan_row(batch.host, one_follower=one_follower), batch.host.packed()
    row = PackedRow(batch, plan)
    columns = packed.tokens, packed.positions
    token_U, position_U = (sent(x if plan is None else x[plan.first_U], row.device) for x in columns)
    # With a cache or a mask, transformers would treat the row as a single sequence.
    inputs = {"input_ids": token_U[None], "position_ids": position_U[None], "packed_row": row, "use_cache": False}
    for side in ("q", "k"):  # for flash attention
        inputs |= {f"cu_seq_lens_{side}": row.borders, f"max_length_{side}": row.longest}
    return inputs, plan and plan.place_N


def called(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Return the output of a model for arguments that `packed_inputs` made, or for a padded batch."""
    _skip_border_search()
    token = _has_borders.set(True)
    try:
        return model(**inputs)
    finally:
        _has_borders.reset(token)


@cache
def _skip_border_search() -> None:
    """Keep transformers from searching positions for the borders of sequences during `called`.

    The search is for masks that the attention of this file does not use, and it makes the host wait for a GPU.
    """
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices

    def find(position_ids: Tensor) -> Tensor | None:
        return None if _has_borders.get() else search(position_ids)

    masking_utils.find_packed_sequence_indices = find


def _refusal(model: nn.Module, why: str) -> str:
    return f"{type(model).__name__} cannot be trained on packed sequences: {why}; set packing=False"


def _probe_row(model: PreTrainedModel) -> Batch:
    """Return four sequences, of which the last two have a common prefix."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (6, 1, 9)]
    rows.append([*rows[2][:5], *rows[0][:2]])
    return Batch.from_rows({"tokens": rows})


def _mask(attention_mask: Tensor | None = None, local_size: int | None = None, **arguments: Any) -> Tensor | None:
    """Return the mask of the layers: None, or a tensor [1, 1, 1, 1] with the number of tokens of their window, or a
    real mask.

    Args:
        attention_mask: [R, S] False at padding.
        local_size: tokens that a token sees, itself included.
        arguments: as transformers calls functions that make masks.
    """
    from transformers.masking_utils import sdpa_mask

    if attention_mask is not None or arguments["q_length"] != arguments["kv_length"]:
        return sdpa_mask(attention_mask=attention_mask, local_size=local_size, **arguments)
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)


def _attention(
    module: nn.Module,
    query_RHND: Tensor,
    key_RKND: Tensor,
    value_RKND: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_row: PackedRow | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: return [R, N, H, D] and no attention weights.

    Args:
        attention_mask: mask that `_mask` returned.
        s_aux: [H] attention sinks: logits that take part in the softmax without a value.
        packed_row: places of the sequences in the single row. None: every row is a sequence.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    is_window = attention_mask is not None and attention_mask.dtype == torch.int64
    is_masked, plain = attention_mask is not None and not is_window, softcap is None and s_aux is None
    is_causal = rest.get("is_causal") is not False and getattr(module, "is_causal", True)
    odd = rest.get("position_bias") is not None or not is_causal
    if odd or (is_masked and (packed_row is not None or not plain)):
        raise ValueError(f"{type(module).__name__} has a mask or a bias beside its order; set packing=False")
    if is_masked:
        arguments = {"scaling": scaling, "dropout": dropout, **rest}
        return sdpa_attention_forward(module, query_RHND, key_RKND, value_RKND, attention_mask, **arguments)
    # Under autocast, rotary embeddings return float32 queries and keys, which the kernel does not support.
    query_RHND, key_RKND, value_RKND = as_multiplied(query_RHND, key_RKND, value_RKND)
    slices = WHOLE_ROWS if packed_row is None else packed_row.slices
    sinks_H = None if s_aux is None else slices.own_heads(s_aux)
    window = None if attention_mask is None else int(attention_mask)
    scale = query_RHND.shape[-1] ** -0.5 if scaling is None else scaling
    attend = partial(_by_sdpa if plain else partial(_by_hand, softcap=softcap, s_aux=sinks_H), scale, dropout, window)
    inputs = query_RHND, key_RKND, value_RKND
    if packed_row is None:
        return attend(*inputs).transpose(1, 2).contiguous(), None
    inputs = slices.to_heads(*inputs, packed_row.places)
    kernel = registry.find("packed attention", query_RHND.device.type)
    if kernel is not None and plain and dropout == 0 and kernel.supports(query_RHND, value_RKND):
        output_1UHD = kernel.attend(*inputs, packed_row, scale, window)
    else:
        query_1HUD, key_1KUD, value_1KUD = inputs
        parts = zip(packed_row.queries(query_1HUD), *map(packed_row.keys, (key_1KUD, value_1KUD)), strict=True)
        output_1UHD = packed_row.from_rectangles([attend(query, key, value) for query, key, value in parts])
    return slices.from_heads(output_1UHD), None


def _by_sdpa(
    scale: float, dropout: float, window: int | None, query_RHSD: Tensor, key_RKTD: Tensor, value_RKTD: Tensor
) -> Tensor:
    queries, keys = query_RHSD.shape[2], key_RKTD.shape[2]
    is_whole = queries == keys and (window is None or window >= keys)
    mask_ST = None if is_whole else _seen(queries, keys, window, query_RHSD.device)
    return scaled_dot_product_attention(
        query_RHSD,
        key_RKTD,
        value_RKTD,
        attn_mask=mask_ST,
        is_causal=is_whole,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query_RHSD.shape[1] != key_RKTD.shape[1],
    )


def _by_hand(
    scale: float,
    dropout: float,
    window: int | None,
    query_RHSD: Tensor,
    key_RKTD: Tensor,
    value_RKTD: Tensor,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    group = query_RHSD.shape[1] // key_RKTD.shape[1]
    key_RHTD, value_RHTD = (x.repeat_interleave(group, 1) for x in (key_RKTD, value_RKTD))
    score_RHST = query_RHSD @ key_RHTD.transpose(2, 3) * scale
    if softcap is not None:
        score_RHST = torch.tanh(score_RHST / softcap) * softcap
    queries, keys = score_RHST.shape[2:]
    score_RHST = score_RHST.masked_fill(~_seen(queries, keys, window, score_RHST.device), -torch.inf)
    if s_aux is not None:
        sink_RHS1 = s_aux.view(1, -1, 1, 1).to(score_RHST.dtype).expand(*score_RHST.shape[:-1], 1)
        score_RHST = torch.cat([score_RHST, sink_RHS1], -1)
    share_RHST = score_RHST.softmax(-1, dtype=torch.float32).to(query_RHSD.dtype)[..., :keys]
    return drop(share_RHST, dropout) @ value_RHTD


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask [S, T] bool: True if the query attends to the key, which is in its window and not after
    it.

    The last query is the last key.
    """
    seen_ST = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen_ST if window is None else seen_ST.triu(keys - queries + 1 - window)

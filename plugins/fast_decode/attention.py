"""Attention of one new token per row that does not copy the cache.

If several query heads share a key head, transformers repeats keys and values for each query head before it calls torch,
in every step that has a mask. For a single query position, the query heads of a group can be passed as the positions of
one head instead. This gives the same numbers and reads the cache in place. Measured on a CPU with 512 rows, 40
positions and 4 heads over 2 key heads: 1.2 ms instead of 11 ms.

On a CPU, torch's attention computes each head of each row separately. With few positions the overhead exceeds the
computation. Two batched matrix products over all heads take a third of the time, if the heads are contiguous in memory.
They therefore include the full capacity of the cache, and positions beyond the sequence get weight 0.

Legend: `R` rows, `H` query heads, `K` key heads, `G` query heads per key head, `D` head size, `S` positions in the
cache, `C` capacity of the cache in positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "troupe_grouped_decoding"
_MOST_POSITIONS = 256
"""Maximum number of positions for the two matrix products. Beyond it torch's attention is as fast, and does not keep
the scores in memory."""


def use_grouped_decoding(model: PreTrainedModel) -> None:
    """Make `model` decode with this attention if it uses torch's SDPA. Otherwise the model stays unchanged."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(_NAME, _grouped_decoding)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


def uses_grouped_decoding(model: Any) -> bool:
    """True if the model decodes with this attention, which takes a mask of [R, 1, 1, S] booleans."""
    return model.config._attn_implementation == _NAME


def _grouped_decoding(
    module: nn.Module,
    query_RH1D: Tensor,
    key_RKSD: Tensor,
    value_RKSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention function in the signature of transformers. Returns [R, 1, H, D], and None for the attention weights."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, positions, size = query_RH1D.shape
    key_heads = key_RKSD.shape[1]
    # The query heads of a group are computed like positions of one head, which share a mask. Masks that differ between
    # heads need the general function.
    one_mask_for_all_heads = attention_mask is None or attention_mask.shape[1] == 1
    if positions > 1 or not one_mask_for_all_heads or rest.get("position_bias") is not None:
        return sdpa_attention_forward(module, query_RH1D, key_RKSD, value_RKSD, attention_mask, scaling=scaling, **rest)
    query_RKGD = query_RH1D.reshape(rows, key_heads, heads // key_heads, size)
    key_RKCD = _whole_capacity(key_RKSD)
    value_RKCD = _whole_capacity(value_RKSD)
    if query_RH1D.device.type == "cpu" and key_RKCD is not None and value_RKCD is not None:
        output = _by_two_products(query_RKGD, key_RKCD, value_RKCD, key_RKSD.shape[2], attention_mask, scaling)
    else:
        output = scaled_dot_product_attention(query_RKGD, key_RKSD, value_RKSD, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, -1), None


def _by_two_products(
    query_RKGD: Tensor,
    key_RKCD: Tensor,
    value_RKCD: Tensor,
    positions: int,
    mask_R1xS: Tensor | None,
    scaling: float | None,
) -> Tensor:
    rows, key_heads, group, size = query_RKGD.shape
    # In float32 like torch's attention: bfloat16 rounding after each operation would make scores and weights several
    # times less exact. Tensors that are float32 already are not copied.
    dtype = query_RKGD.dtype
    scale: float = size**-0.5
    if scaling is not None:
        scale = scaling
    scaled = query_RKGD.float() * scale
    key_RKCD = key_RKCD.float()
    value_RKCD = value_RKCD.float()
    score = torch.bmm(scaled.flatten(0, 1), key_RKCD.flatten(0, 1).transpose(1, 2))
    # Positions beyond the sequence get weight 0 in the softmax.
    score[..., positions:] = -torch.inf
    if mask_R1xS is not None:
        score.view(rows, key_heads, group, -1)[..., :positions].masked_fill_(~mask_R1xS, -torch.inf)
    output = torch.bmm(score.softmax(-1), value_RKCD.flatten(0, 1))
    return output.view(rows, key_heads, group, -1).to(dtype)


def _whole_capacity(x_RKSD: Tensor) -> Tensor | None:
    """Return the full buffer [R, K, C, D] of which keys or values are a view of the first positions.

    Return None if they are not such a view, or if the capacity exceeds `_MOST_POSITIONS`.
    """
    rows, heads, positions, size = x_RKSD.shape
    capacity = x_RKSD.stride(1) // size
    has_strides = x_RKSD.stride() == (heads * capacity * size, capacity * size, size, 1)
    is_view_of_buffer = has_strides and not x_RKSD.storage_offset()
    if not is_view_of_buffer or not positions <= capacity <= _MOST_POSITIONS:
        return None
    return x_RKSD.as_strided((rows, heads, capacity, size), x_RKSD.stride())

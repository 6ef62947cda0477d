"""Attention of one new token per row that does not copy the cache.

Where several query heads share a key head, transformers repeats keys and values for each of them before it calls
torch, in every step, as soon as there is a mask. For a single query position the heads of a group can stand as the
positions of one head instead: the same numbers from the cache as it lies. Measured on CPU (512 rows, 40 positions, 4
heads over 2): 1.2 ms instead of 11.

torch's own attention on a CPU takes each head of each row by itself, which costs more than what it computes while
positions are few. Two products of all of them take a third of the time, if no gaps are between the heads: so they
take the cache's whole capacity along, and what is beyond its positions gets no weight.

Legend: `R` rows, `H` query heads, `K` key heads, `G` of H for each of K, `D` head size, `S` positions in the cache,
`C` its capacity in positions.
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
"""Beyond, torch's own attention is as fast, which has no scores in memory."""


def use_grouped_decoding(model: PreTrainedModel) -> None:
    """Let `model` decode this way, if it uses torch's attention at all; nothing else about it changes."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(_NAME, _grouped_decoding)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


def _grouped_decoding(
    module: nn.Module,
    query_RH1D: Tensor,
    key_RKSD: Tensor,
    value_RKSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """As transformers calls attention: returns [R, 1, H, D] and no attention weights."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, positions, size = query_RH1D.shape
    key_heads = key_RKSD.shape[1]
    one_mask_for_all_heads = attention_mask is None or attention_mask.shape[1] == 1
    if positions > 1 or not one_mask_for_all_heads or rest.get("position_bias") is not None:
        return sdpa_attention_forward(module, query_RH1D, key_RKSD, value_RKSD, attention_mask, scaling=scaling, **rest)
    query_RKGD = query_RH1D.reshape(rows, key_heads, heads // key_heads, size)
    key_RKCD, value_RKCD = _whole_capacity(key_RKSD), _whole_capacity(value_RKSD)
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
    # In float32, as torch's own attention: rounded to bfloat16 after each of these operations, scores and weights
    # would be several times as far from the exact ones. For float32 nothing is copied.
    dtype = query_RKGD.dtype
    query_RKGD, key_RKCD, value_RKCD = query_RKGD.float(), key_RKCD.float(), value_RKCD.float()
    scaled = query_RKGD * (size**-0.5 if scaling is None else scaling)
    score = torch.bmm(scaled.flatten(0, 1), key_RKCD.flatten(0, 1).transpose(1, 2))
    score[..., positions:] = -torch.inf
    if mask_R1xS is not None:
        score.view(rows, key_heads, group, -1)[..., :positions].masked_fill_(~mask_R1xS, -torch.inf)
    output = torch.bmm(score.softmax(-1), value_RKCD.flatten(0, 1))
    return output.view(rows, key_heads, group, -1).to(dtype)


def _whole_capacity(x_RKSD: Tensor) -> Tensor | None:
    """[R, K, C, D] the memory that keys or values are the beginning of, head by head; None if it is not of this kind,
    or long.
    """
    rows, heads, positions, size = x_RKSD.shape
    capacity = x_RKSD.stride(1) // size
    is_so = x_RKSD.stride() == (heads * capacity * size, capacity * size, size, 1) and not x_RKSD.storage_offset()
    if not is_so or not positions <= capacity <= _MOST_POSITIONS:
        return None
    return x_RKSD.as_strided((rows, heads, capacity, size), x_RKSD.stride())

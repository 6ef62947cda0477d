"""Attention of one new token per row that does not copy the cache.

Where several query heads share a key head, transformers repeats keys and values for each of them before it calls
torch, in every step, as soon as there is a mask. For a single query position the heads of a group can stand as the
positions of one head instead: the same numbers from the cache as it lies. Measured on CPU (512 rows, 40 positions, 4
heads over 2): 1.2 ms instead of 11.

Legend: `R` rows, `H` query heads, `K` key heads, `D` head size, `S` positions in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "troupe_grouped_decoding"


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
    grouped = query_RH1D.reshape(rows, key_heads, heads // key_heads, size)
    output = scaled_dot_product_attention(grouped, key_RKSD, value_RKSD, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, -1), None

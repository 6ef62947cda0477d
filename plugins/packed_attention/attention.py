"""Attention of a packed row with torch's variable-length kernel.

Legend: `U` places of the row, `N` queries or keys of all parts end to end, `H` query heads, `K` key heads, `D` size of
a head.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from components.models.packing.packed_row import PackedRow
from plugins.packed_attention.parts import kernel_parts, picked


class VariableLength:
    """Attention with a variable-length kernel, which computes each part of a row against the keys of its sequence."""

    def __init__(self, kernel: Callable[..., Any] | None = None) -> None:
        """
        Args:
            kernel: function with the arguments of torch's `varlen_attn`. None: that function.
        """
        self._kernel = kernel

    def supports(self, query_1HUD: Tensor, value_1KUD: Tensor) -> bool:
        """Return True if the kernel computes heads of this dtype and size."""
        fits = query_1HUD.shape[-1] == value_1KUD.shape[-1] <= 256
        return query_1HUD.dtype in (torch.bfloat16, torch.float16) and fits

    def attend(
        self,
        query_1HUD: Tensor,
        key_1KUD: Tensor,
        value_1KUD: Tensor,
        row: PackedRow,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Compute causal attention, [1, U, H, D].

        Args:
            query_1HUD: queries of the row. Each is computed once, although several sequences may share it.
            key_1KUD: keys of the row. H is a multiple of K.
            value_1KUD: values of the row.
            row: places of the sequences.
            scale: factor of the scores.
            window: number of tokens that a token attends to, including itself. None: no limit.
        """
        parts = kernel_parts(row)
        query_UHD, key_UKD, value_UKD = (x.squeeze(0).transpose(0, 1) for x in (query_1HUD, key_1KUD, value_1KUD))
        query_NHD = picked(query_UHD, parts.queries).contiguous()
        key_NKD, value_NKD = (picked(x, parts.keys).contiguous() for x in (key_UKD, value_UKD))
        before = -1
        if window is not None:
            before = window - 1
        output_NHD = self._call(
            *(query_NHD, key_NKD, value_NKD),
            *(parts.query_borders, parts.key_borders, parts.most_queries, parts.most_keys),
            scale=scale,
            # The last query of a part is at its last key. (-1, 0) is causal without a window.
            window_size=(before, 0),
        )
        # Overlapping parts compute a place several times with the same result.
        if parts.query_U is not None:
            output_NHD = output_NHD.index_select(0, parts.query_U)
        return output_NHD[None]

    def _call(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, *borders: Any, **options: Any) -> Tensor:
        kernel: Any = self._kernel
        if kernel is None:
            from torch.nn.attention.varlen import varlen_attn as kernel
        group = query_NHD.shape[1] // key_NKD.shape[1]
        if "enable_gqa" in signature(kernel).parameters:
            options["enable_gqa"] = group > 1
        elif group > 1:
            # The function of torch before 2.12 refuses grouped queries.
            key_NKD, value_NKD = (x.repeat_interleave(group, 1) for x in (key_NKD, value_NKD))
        return kernel(query_NHD, key_NKD, value_NKD, *borders, **options)


VARIABLE_LENGTH = VariableLength()

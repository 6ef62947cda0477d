"""A cache of keys and values with room for the tokens to come.

transformers' own grows by making a copy of itself for every token. Measured on CPU (512 rows, 64 new tokens, 2 layers
of 2 heads of 32): a seventh of the time of a whole generation.

Legend: `R` rows, `K` key heads, `S` positions, `D` head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Positions that are added when there is no room left: so many, or a share of what is there already.
_MORE, _MORE_SHARE = 16, 8


class _RoomyLayer(DynamicLayer):
    """`keys` and `values`, [R, K, S, D], are views of the first S positions of what was allocated."""

    keys: Any
    values: Any
    _space: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append positions; returns all keys and all values."""
        # Under autocast rotated keys come in float32: attention would round all of them anew for every token.
        key_states = key_states.to(value_states.dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._space is None and self.get_seq_length() == 0:
            # The prompts: nothing is appended to them before their rows are selected.
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if self._space is None or end > self._space[0].shape[-2]:
            more = max(end - length, _MORE, length // _MORE_SHARE)
            self._space = _with_space(self.keys, more), _with_space(self.values, more)
        keys, values = self._space
        keys[:, :, length:end] = key_states
        values[:, :, length:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; of rows that have room already only those that change place are copied."""
        if self._space is None or len(indices) > len(self.keys):
            super().batch_select_indices(indices)
            self._space = None
            return
        length, rows = self.get_seq_length(), len(indices)
        place = (indices != torch.arange(rows, device=indices.device)).nonzero().squeeze(1)
        source = indices[place]
        keys, values = self._space[0][:rows], self._space[1][:rows]
        keys[place, :, :length] = self.keys[source]
        values[place, :, :length] = self.values[source]
        self._space = keys, values
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]


def _with_space(x_RKSD: Tensor, more: int) -> Tensor:
    rows, heads, positions, size = x_RKSD.shape
    space = x_RKSD.new_empty(rows, heads, positions + more, size)
    space[:, :, :positions] = x_RKSD
    space[:, :, positions:] = 0  # attention may multiply it by 0
    return space


def spare_cache(model: Any) -> DynamicCache:
    """An empty cache for `model`; layers of another kind than plain attention stay as transformers makes them."""
    cache = DynamicCache(config=model.config)
    cache.layers = [_RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache

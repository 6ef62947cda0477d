"""Decoding with a cache that has free positions, and attention that does not copy it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components.generate.decoding import Decoding
from plugins.fast_decode.attention import use_grouped_decoding
from plugins.fast_decode.cache import spare_cache

if TYPE_CHECKING:
    from transformers import DynamicCache


class FastDecoding(Decoding):
    """Grouped-query attention over a preallocated cache."""

    def prepare(self, model: Any) -> None:
        use_grouped_decoding(model)

    def new_cache(self, model: Any) -> DynamicCache:
        return spare_cache(model)

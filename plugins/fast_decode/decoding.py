"""Decoding with a cache that has free positions, and attention that does not copy it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from components.generate.decoding import Decoding
from plugins.fast_decode.attention import use_grouped_decoding
from plugins.fast_decode.cache import spare_cache
from plugins.fast_decode.device_loop import generate_rows

if TYPE_CHECKING:
    from transformers import DynamicCache


class FastDecoding(Decoding):
    """Grouped-query attention over a preallocated cache, and on a GPU a loop that does not wait for it."""

    is_on_gpu = False

    def prepare(self, model: Any) -> None:
        self.is_on_gpu = next(model.parameters()).is_cuda
        use_grouped_decoding(model)

    def loop(self, engine: Any) -> Any:
        # On a CPU nothing waits, and tokens must stay the same to the bit.
        if not self.is_on_gpu:
            return None
        return partial(generate_rows, engine)

    def new_cache(self, model: Any) -> DynamicCache:
        return spare_cache(model, reads_indices=not self.is_on_gpu)

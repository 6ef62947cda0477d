"""Attention and key-value cache of decoding token by token, as transformers has them.

The plug-in fast_decode provides a subclass as the `decoding` "fast", which the hf engine uses where it is there. Both
draw the same tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import DynamicCache


class Decoding:
    """The attention and the key-value cache of transformers."""

    def prepare(self, model: Any) -> None:
        """Change the attention of a model, once, before it generates."""

    def new_cache(self, model: Any) -> DynamicCache:
        """Return an empty cache of keys and values for `model`."""
        from transformers import DynamicCache

        return DynamicCache(config=model.config)

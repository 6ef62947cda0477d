"""Attention and key-value cache of token-by-token decoding, as implemented by transformers.

The plug-in fast_decode provides a subclass as the `decoding` "fast", which the hf engine uses if the plug-in is
present. Both give the same tokens on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import DynamicCache


class Decoding:
    """Decoding with the attention and the key-value cache of transformers."""

    def prepare(self, model: Any) -> None:
        """Replace the attention of a model in place, once, before it generates."""

    def loop(self, engine: Any) -> Any:  # noqa: ARG002
        """Return a function that generates rows as the hf engine's own loop does, or None to use that loop.

        Args:
            engine: the hf engine.
        """
        return None

    def new_cache(self, model: Any) -> DynamicCache:
        """Return an empty cache of keys and values for `model`."""
        from transformers import DynamicCache

        return DynamicCache(config=model.config)

"""Choice of the attention implementation that a model is loaded with. This module does not import torch."""

from __future__ import annotations

import importlib.util

from components.installed import is_available


def choose_attention(requested: str | None, gpus: int) -> str | None:
    """Return the attention implementation to load models with, or None for transformers' default.

    Args:
        requested: requested implementation. Flash attention that cannot run is replaced by sdpa. `auto` selects flash
            attention if it can run, and transformers' default otherwise.
        gpus: number of GPUs.
    """
    if requested == "auto":
        # None leaves the choice to transformers, which selects sdpa where a model supports it.
        if not gpus or importlib.util.find_spec("flash_attn") is None:
            return None
        return "flash_attention_2"
    # sdpa runs everywhere, so the same command works on a machine without flash attention.
    if attention_note(requested, gpus):
        return "sdpa"
    return requested


def attention_note(requested: str | None, gpus: int) -> str:
    """Return the reason why sdpa replaces the requested attention; empty if it does not."""
    if requested is None or not requested.startswith("flash_attention"):
        return ""
    if not gpus:
        return f"attn_implementation={requested} needs a GPU, and there is none: sdpa is used"
    if requested == "flash_attention_2" and not is_available("flash_attn"):
        return f"attn_implementation={requested} needs the package flash_attn, which is not installed: sdpa is used"
    return ""

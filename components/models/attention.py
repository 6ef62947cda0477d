"""Choice of the attention implementation that a model is loaded with. Nothing here needs torch."""

from __future__ import annotations

import importlib.util

from components.installed import is_there


def choose_attention(asked: str | None, gpus: int) -> str | None:
    """The attention kernels to load models with: those asked for, and sdpa in place of flash attention that cannot run
    there; of `auto` flash attention where it can run, else transformers' own choice, which is None.
    """
    if asked == "auto":
        return "flash_attention_2" if gpus and importlib.util.find_spec("flash_attn") is not None else None
    return "sdpa" if attention_note(asked, gpus) else asked


def attention_note(asked: str | None, gpus: int) -> str:
    """Why sdpa is used in place of the attention that is asked for; empty where it is not."""
    if asked is None or not asked.startswith("flash_attention"):
        return ""
    if not gpus:
        return f"attn_implementation={asked} needs a GPU, and there is none: sdpa is used"
    if asked == "flash_attention_2" and not is_there("flash_attn"):
        return f"attn_implementation={asked} needs the package flash_attn, which is not installed: sdpa is used"
    return ""

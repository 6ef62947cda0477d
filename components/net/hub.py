"""Local caches of models, and limits of the files in them.

This module does not import torch, because a recipe's `main.py` checks its inputs before it starts anything that takes
long. `hub_requests.py` asks the Hugging Face hub.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

MOST_CONFIG_BYTES = 16_000_000
"""Maximum size of a config.json in bytes."""
MOST_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 2_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 1_000_000),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 10_000_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), 100_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 100_000),
    "vocab_size": 100_000_000,
    "max_position_embeddings": 1_000_000_000,
}
"""Maximum sizes in a config.json. They are far above those of any model, and small enough to compute with."""


WEIGHTS = ("*.safetensors", "*.bin")
"""Patterns of the files that hold a model's weights."""


def cache_root() -> Path:
    """Return the folder for files that can be created again.

    It is $TROUPE_CACHE, $XDG_CACHE_HOME/troupe or ~/.cache/troupe.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TROUPE_CACHE") or f"{base}/troupe").expanduser().absolute()


def cached_folder(name: str) -> Path:
    """Return the folder of the newest model of this name in the hub's local cache. It may not exist."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:  # the name cannot be a name on the hub
        config = None
    if not isinstance(config, str):
        return Path(name)
    return Path(config).parent


def check_sizes(file: Path) -> None:
    """Check the sizes in a config.json, before a library allocates lists of that length. The file need not exist.

    Raises:
        ValueError: the file is too large or not valid, or a size is not plausible. The message names the size.
    """
    if not file.is_file():
        return
    if file.stat().st_size > MOST_CONFIG_BYTES:
        raise ValueError(f"its config.json has {file.stat().st_size} bytes; the maximum is {MOST_CONFIG_BYTES}")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its config.json cannot be used: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise ValueError(f"its config.json cannot be used: it is a {type(config).__name__}, not an object")
    # Models of several modalities have nested configurations.
    for settings in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, most in MOST_SIZES.items():
            value = settings.get(name)
            least = int("experts" not in name)  # a model without experts may have 0 of them
            is_size = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
            if value is not None and not is_size:
                raise ValueError(f"its config.json has {name}={value!r:.100}; set a number from {least} to {most}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

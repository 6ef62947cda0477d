"""What the Hugging Face hub has, asked once and with a deadline: its libraries try again for up to a minute.

Nothing here needs torch: a recipe's `main.py` checks its inputs before anything heavy starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HUB_TIMEOUT_S = 10
"""Seconds in which the hub has to answer before what is in the local cache is all there is."""
MOST_CONFIG_BYTES = 16_000_000
MOST_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 2_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 1_000_000),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 10_000_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), 100_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 100_000),
    "vocab_size": 100_000_000,
    "max_position_embeddings": 1_000_000_000,
}
"""Sizes in a config.json, at most: far above those of any model, and small enough to compute with."""


WEIGHTS = ("*.safetensors", "*.bin")
"""Patterns of the files that hold a model's weights."""


class ModelNotFound(ValueError):
    """Raised for a model that this machine does not have, though another one may."""


def why_unreachable(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Say why the hub cannot be asked about a model or data set; None when it answers, whatever it answers."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    ask = api.model_info if kind == "model" else api.dataset_info
    try:
        ask(name, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        # It will answer the same when the thing itself is asked for, and that message is the better one.
        return None
    except Exception as error:  # noqa: BLE001 - which HTTP library's errors these are depends on the version
        return first_line(error)
    return None


def cache_root() -> Path:
    """Find the folder for what can be made again: $TROUPE_CACHE, $XDG_CACHE_HOME/troupe or ~/.cache/troupe."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TROUPE_CACHE") or f"{base}/troupe").expanduser().absolute()


def cached_folder(name: str) -> Path:
    """Return the folder where the hub's library keeps the newest cached model of this name; it may not exist."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:
        config = None
    return Path(config).parent if isinstance(config, str) else Path(name)


def find_model(path: str) -> PretrainedConfig:
    """The config.json of a model, in a folder, in the local cache, or on the hub.

    Raises:
        ModelNotFound: no folder, cache or hub has the model; the message continues after `option=path: `.
        ValueError: it is there and cannot be used.
    """
    from transformers import AutoConfig

    folder = Path(path).expanduser()
    is_folder = folder.exists() or path.startswith(("/", ".", "~"))
    if is_folder and not folder.exists():
        raise ModelNotFound("it does not exist")
    if is_folder and not (folder / "config.json").is_file():
        raise ValueError("there is no model (no config.json in it); give a folder that has one")
    reason = None if is_folder else why_unreachable(path, "model")
    check_sizes((folder if is_folder else cached_folder(path)) / "config.json")
    try:
        return AutoConfig.from_pretrained(
            folder if is_folder else path, local_files_only=reason is not None, trust_remote_code=False
        )
    except (OSError, ValueError, RecursionError) as error:
        reason = reason or first_line(error)
        if is_folder:
            raise ValueError(f"its config.json cannot be used: {reason}") from error
        raise ModelNotFound(f"it is no folder here, and the hub did not give it ({reason})") from error


def check_sizes(file: Path) -> None:
    """Check the sizes in a config.json, before a library makes lists of so many layers; it need not be there.

    Raises:
        ValueError: a size is no number that a model has; the message names it.
    """
    if not file.is_file():
        return
    if file.stat().st_size > MOST_CONFIG_BYTES:
        raise ValueError(f"its config.json has {file.stat().st_size} bytes; {MOST_CONFIG_BYTES} are the most")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its config.json cannot be used: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise ValueError(f"its config.json cannot be used: it is a {type(config).__name__}, not an object")
    for settings in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, most in MOST_SIZES.items():
            value = settings.get(name)
            least = 0 if "experts" in name else 1
            is_size = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
            if value is not None and not is_size:
                raise ValueError(
                    f"its config.json has {name}={value!r:.100}; it must be a number from {least} to {most}"
                )


def first_line(error: BaseException) -> str:
    """What an error of a library says, short enough for a message of ours."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

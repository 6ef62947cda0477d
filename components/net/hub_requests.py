"""Models and data sets of the Hugging Face hub, with a single request and a timeout.

The libraries of the hub retry for up to a minute. This module does not import torch, because a recipe's `main.py`
checks its inputs before it starts anything that takes long.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from components.net.hub import cached_folder, check_sizes, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HUB_TIMEOUT_S = 10
"""Timeout of a request to the hub in seconds. After it only the local cache is used."""


class ModelNotFound(ValueError):
    """Raised for a model that does not exist on this machine. Another machine may have it."""


def why_unreachable(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Return the reason why the hub does not respond to a request for a model or data set, or None if it responds."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    request = {"model": api.model_info, "dataset": api.dataset_info}[kind]
    try:
        request(name, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        # The hub has responded with an error. The download will get the same error, with a better message.
        return None
    except Exception as error:  # noqa: BLE001 - which HTTP library's errors these are depends on the version
        return first_line(error)
    return None


def find_model(path: str) -> PretrainedConfig:
    """Return the configuration of a model in a folder, in the local cache, or on the hub.

    Raises:
        ModelNotFound: no folder, cache or hub has the model. The message is written to follow `option=path: `.
        ValueError: the model exists and cannot be used.
    """
    from transformers import AutoConfig

    folder = Path(path).expanduser()
    is_folder = folder.exists() or path.startswith(("/", ".", "~"))
    # A path that does not exist must not be sent to the hub as a name.
    if is_folder and not folder.exists():
        raise ModelNotFound("it does not exist")
    if is_folder and not (folder / "config.json").is_file():
        raise ValueError("there is no model (no config.json in it); give a folder that has one")
    if is_folder:
        check_sizes(folder / "config.json")
        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"its config.json cannot be used: {first_line(error)}") from error
    reason = why_unreachable(path, "model")
    check_sizes(cached_folder(path) / "config.json")
    try:
        # Offline, transformers would otherwise retry before it reads its cache.
        return AutoConfig.from_pretrained(path, local_files_only=reason is not None, trust_remote_code=False)
    except (OSError, ValueError, RecursionError) as error:
        reason = reason or first_line(error)
        raise ModelNotFound(f"it is no folder here, and the hub did not give it ({reason})") from error

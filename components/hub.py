"""What the Hugging Face hub has, asked once and with a deadline: its libraries try again for up to a minute.

Nothing here needs torch: a recipe's `main.py` checks its inputs before anything heavy starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HUB_TIMEOUT_S = 10
"""Seconds in which the hub has to answer before what is in the local cache is all there is."""


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
    try:
        return AutoConfig.from_pretrained(
            folder if is_folder else path, local_files_only=reason is not None, trust_remote_code=False
        )
    except (OSError, ValueError, RecursionError) as error:
        reason = reason or first_line(error)
        if is_folder:
            raise ValueError(f"its config.json cannot be used: {reason}") from error
        raise ModelNotFound(f"it is no folder here, and the hub did not give it ({reason})") from error


def first_line(error: BaseException) -> str:
    """What an error of a library says, short enough for a message of ours."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

"""Settings files of a model: config.json and generation_config.json, written so that transformers can load them."""

from __future__ import annotations

import copy
import logging
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from components.net.hub import first_line

_log = logging.getLogger(__name__)
_MOST_FLAGS = 100
"""Maximum number of attempts to save a generation_config.json, each of which drops the flags that are refused."""


def save_settings(folder: Path, config: Any, generation_config: Any | None) -> list[str]:
    """Write config.json and generation_config.json.

    transformers refuses to save a generation_config.json that it loads, such as one with a temperature and without
    sampling. The flags that it objects to are left out, and named in a warning.

    Args:
        folder: path to an existing folder.
        config: configuration of transformers.
        generation_config: generation configuration of transformers. None: the model does not generate.

    Returns:
        The names of the flags that are left out.

    Raises:
        ValueError: a file cannot be saved. The message has the reason from transformers.
    """
    try:
        config.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # whatever a value that JSON cannot hold raises
        raise ValueError(f"its config.json cannot be saved: {first_line(error)}") from error
    if generation_config is None:
        return []
    return _save_generation_config(folder, generation_config)


def _save_generation_config(folder: Path, generation_config: Any) -> list[str]:
    # A copy, because the model goes on generating with the original flags.
    settings = copy.deepcopy(generation_config)
    dropped: list[str] = []
    for _ in range(_MOST_FLAGS):
        try:
            settings.save_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # as above
            flags = _refused_flags(str(error), settings)
            if not flags:
                raise ValueError(f"its generation_config.json cannot be saved: {_one_line(error)}") from error
            for flag in flags:
                setattr(settings, flag, None)
            dropped += flags
        else:
            break
    if dropped:
        _warn_once(", ".join(f"{flag}={getattr(generation_config, flag)!r}" for flag in dropped))
    return dropped


@lru_cache
def _warn_once(values: str) -> None:
    """Log a warning once per set of flags, because every checkpoint of a run leaves out the same ones."""
    _log.warning("exports have a generation_config.json without %s, which transformers does not save", values)


def _refused_flags(message: str, settings: Any) -> list[str]:
    """Return the flags that a message of transformers refuses: all flags of a list, or else the first one it names."""
    listed = re.findall(r"^- `(\w+)`:", message, re.MULTILINE)
    named = listed or re.findall(r"`(\w+)`", message) or [name for name in vars(settings) if name in message]
    flags = [flag for flag in dict.fromkeys(named) if getattr(settings, flag, None) is not None]
    if listed:
        return flags
    return flags[:1]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

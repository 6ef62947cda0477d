"""Adapters in a folder in peft's format: settings that are read before a model is loaded. Imports without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from components.train.config import TrainOptions

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_PLAIN: Mapping[str, Any] = {
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "target_parameters": None,
    "trainable_token_indices": None,
}
"""Settings of special adapters -> the values that they have in plain low-rank adapters."""


def adapter_settings(folder: str) -> dict[str, Any]:
    """Return the options of the adapters in a folder: `lora_rank`, `lora_alpha` and `lora_target_modules`.

    Raises:
        ValueError: the folder has no adapters, or they are not plain low-rank ones.
    """
    path = Path(folder).expanduser()
    for name in (SETTINGS, WEIGHTS):
        if not (path / name).is_file():
            raise ValueError(f"lora_path={folder} has no {name}; set it to a folder of adapters that peft has written")
    try:
        settings = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
        rank = int(settings["r"])
        alpha = float(settings["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"lora_path={folder}: {SETTINGS} cannot be read ({error!r})") from error
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"lora_path={folder} has adapters of peft_type={settings.get('peft_type')}; use LORA")
    # Other variants compute something else from the same tensors, so they cannot be merged by the same formula.
    for name, plain in _PLAIN.items():
        if settings.get(name) not in (plain, None, {}, []):
            raise ValueError(
                f"lora_path={folder} has {name}={settings[name]}, and adapters here are plain low-rank ones; merge "
                "them into the model (peft's merge_and_unload), and set model.path to that"
            )
    return {"lora_rank": rank, "lora_alpha": alpha, "lora_target_modules": ",".join(_targets(path, settings))}


def set_options(train: TrainOptions, prefix: str) -> Iterator[str]:
    """Set the adapter options from the files at `lora_path`. Yield a message for each option that contradicts them.

    Args:
        train: options of the training.
        prefix: text before the name of an option in messages.
    """
    try:
        settings = adapter_settings(train.lora_path)
    except ValueError as error:
        yield f"{prefix}{error}"
        return
    defaults = {option.name: option.default for option in fields(TrainOptions)}
    for name, value in settings.items():
        current = getattr(train, name)
        if current not in (defaults[name], value):
            conflict = f"the adapters at {prefix}lora_path={train.lora_path} have {value}"
            yield f"{prefix}{name}={current}, and {conflict}; leave it out"
        # The dataclass is frozen, and the engine must see the rank that the files have.
        object.__setattr__(train, name, value)


def layer_of(name: str) -> str:
    """Return the layer of a tensor in a file of adapters."""
    return name.removeprefix(PREFIX).partition(".lora_")[0]


def _targets(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the target modules in the settings if they are a plain list, otherwise the layers with adapters."""
    from safetensors import safe_open

    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            layers = list(dict.fromkeys(layer_of(name) for name in file.keys()))  # noqa: SIM118 - not a mapping
    except Exception as error:
        raise ValueError(f"lora_path={folder}: {WEIGHTS} cannot be read ({error})") from error
    if not layers:
        raise ValueError(f"lora_path={folder}: {WEIGHTS} is empty")
    # A regular expression, or a list with exclusions, cannot be the value of lora_target_modules. Layer names can.
    endings = settings.get("target_modules")
    if isinstance(endings, list) and not settings.get("exclude_modules"):
        return sorted(endings)
    return layers

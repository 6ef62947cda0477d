"""Folders of small models with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from components.models.loading import without_progress_bars
from components.net.hub import WEIGHTS, cached_folder, first_line
from plugins.shrink.sizes import HEAD_SIZE, small_config

_REPLACED = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_WANTED_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Patterns of the files of a model on the hub that are downloaded. They leave out its weights."""


def shrunk_model(
    path: str, folder: Path, overrides: Mapping[str, Any] | None = None, *, head_size: int | None = None, seed: int = 0
) -> int:
    """Write a small model of the architecture of a large one. Return its number of parameters.

    Args:
        path: folder of the large model, or its name on the hub. It needs no weights.
        folder: folder to write. Files of the tokenizer and the generation configuration are links.
        overrides: values that override the config.json of the large model.
        head_size: size of an attention head of the small model. Default: HEAD_SIZE.
        seed: seed of the random weights.

    Raises:
        ValueError: there is no config.json, or the architecture cannot be made in such a size.
    """
    source = source_folder(path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | dict(overrides or {})
    small = small_config(config, head_size or HEAD_SIZE)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        is_weight = any(file.match(pattern) for pattern in WEIGHTS)
        if file.is_file() and not is_weight and file.name not in _REPLACED:
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(small, indent=2), encoding="utf-8")
    try:
        parameters = _write_weights(folder, seed)
    except Exception as error:  # architectures refuse sizes with different exceptions
        raise ValueError(f"a small copy of the model cannot be made: {first_line(error)}") from error
    # Written again: `save_pretrained` leaves out settings that it does not know.
    (folder / "config.json").write_text(json.dumps(small, indent=2), encoding="utf-8")
    return parameters


def source_folder(path: str) -> Path:
    """Return the folder with the files of a model. A model of the hub is downloaded without its weights.

    Raises:
        ValueError: the folder has no config.json.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = cached_folder(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=_WANTED_FILES))
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json")
    return folder


def _write_weights(folder: Path, seed: int) -> int:
    """Write random weights for the config.json of a folder. Return the number of parameters."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    kind: Any = getattr(transformers, name, transformers.AutoModelForCausalLM.from_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    # The generation configuration of the large model is a link, which `save_pretrained` would write through.
    generation = folder / "generation_config.json"
    settings = generation.with_suffix(".large")
    if generation.is_symlink():
        generation.rename(settings)
    with without_progress_bars():
        model.float().save_pretrained(folder)
    if settings.is_symlink():
        settings.replace(generation)
    return sum(parameter.numel() for parameter in model.parameters())

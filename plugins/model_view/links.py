"""Folders for a model with another tokenizer, chat template or config.json, which every engine can load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from components.net.hub_requests import find_model
from components.registry import load

FILE_PATTERNS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "added_tokens.json", "chat_template*")
"""Glob patterns of the files of a tokenizer."""


def model_view(
    path: str,
    folder: Path,
    overrides: Mapping[str, Any],
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
) -> str:
    """Create a folder with links to the files of a model, and with new versions of the files that change.

    Args:
        path: path of the model: a folder or a name on the Hugging Face hub.
        folder: folder to create. All machines of a run must be able to read it.
        overrides: fields of config.json to replace.
        tokenizer_path: path of the model whose tokenizer is used. Default: the tokenizer of the model.
        chat_template: Jinja text, or path of a file with it. Engines derive the end of a turn from it. Default: the
            template of the model.

    Returns:
        The folder, or `path` if nothing changes.

    Raises:
        ValueError: there is no such model, or its config.json has no such field.
    """
    if not overrides and not tokenizer_path and not chat_template:
        return path
    unknown = sorted(set(overrides) - set(find_model(path).to_dict()))
    if unknown:
        raise ValueError(
            f"model.config_overrides has {', '.join(unknown)}, but config.json of {path} has no such field"
        )
    source = local_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    # A resumed run may have another tokenizer. `_link` would keep a link from before instead of the new file.
    for old in folder.iterdir():
        old.unlink()
    # Files of the model's tokenizer that the other one lacks would be read together with its files.
    own_tokenizer = {file for pattern in FILE_PATTERNS for file in source.glob(pattern) if tokenizer_path}
    _link(folder, (file for file in source.iterdir() if file.name != "config.json" and file not in own_tokenizer))
    if tokenizer_path:
        other = local_folder(tokenizer_path)
        _link(folder, (file for pattern in FILE_PATTERNS for file in other.glob(pattern)))
    settings = json.loads((source / "config.json").read_text(encoding="utf-8")) | dict(overrides)
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    if chat_template:
        template = folder / "chat_template.jinja"
        template.unlink(missing_ok=True)
        template.write_text(
            load("chat template", "checked", "model.chat_template=...")(chat_template), encoding="utf-8"
        )
    return str(folder)


def local_folder(path: str) -> Path:
    """Return the folder of a model. A model of the hub is downloaded."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path))


def _link(folder: Path, files: Iterable[Path]) -> None:
    for file in files:
        target = folder / file.name
        # Links, because a copy of a large model would take minutes and as much space again.
        if file.is_file() and not target.is_symlink():
            target.symlink_to(file.resolve())

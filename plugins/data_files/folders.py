"""Data files of a folder by split, restricted to files inside the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from components.data.readers import FILE_TYPES
from components.data.records import read_file
from components.data.values import kind_of
from components.net.hub import first_line
from plugins.data_files.quiet import quiet

_CONFIG_KEYS = {"data_files", "data_dir", "default", "description", "version"}
"""Supported keys of a configuration in a README."""


def read_folder(folder: Path, data_dir: str | None, split: str, label_key: str | None) -> list[Any]:
    """Return the rows of a split of a folder.

    Args:
        folder: folder with data files.
        data_dir: subfolder with the files. None: the folder itself.
        split: name of the split.
        label_key: see `read_records`.

    Raises:
        ValueError: the folder cannot be read, or has no such split.
    """
    place = folder / (data_dir or "")
    try:
        with quiet():
            files = folder_files(folder, data_dir, FILE_TYPES)
    except Exception as error:  # `datasets` documents no exception types for this
        raise ValueError(
            f"data folder {str(place)!r}, split {split!r}, cannot be read ({first_line(error)}); give a folder with "
            f"{', '.join(FILE_TYPES)} files, or one that save_to_disk wrote"
        ) from error
    if split not in files:
        raise ValueError(
            f"data folder {str(place)!r} has no split {split!r}; set it to one of: {', '.join(map(repr, files))}"
        )
    records: list[Any] = []
    for path in files[split]:
        rows = read_file(path, label_key)
        if not isinstance(rows, list):
            raise ValueError(f"data file {str(path)!r} must hold a list of objects; it holds {kind_of(rows)}")
        records += rows
    return records


def folder_files(folder: Path, data_dir: str | None, file_types: Sequence[str]) -> dict[str, list[Path]]:
    """Find the files of each split of a folder.

    A folder that `save_to_disk` wrote lists its files. In other folders the README may name the files of each split.
    Otherwise the split follows from the file name, by the rules of `datasets`. All files must be inside the folder:
    URLs, absolute paths and `..` are rejected. Symbolic links are followed, because the user created them. No code of
    the folder is run.

    Args:
        folder: folder with data files.
        data_dir: subfolder with the files. The README is then not read.
        file_types: extensions of the files that can be read. Other files are ignored.

    Raises:
        ValueError: a file outside the folder is named, or there are several configurations without a default.
        OSError: there are no data files.
    """
    root = folder / (data_dir or "")
    if (root / "dataset_dict.json").is_file():
        splits = json.loads((root / "dataset_dict.json").read_text())["splits"]
        return {split: _saved_files(root / _inside(split, "dataset_dict.json")) for split in splits}
    # A single data set without splits, which `save_to_disk` writes without dataset_dict.json.
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        return {"train": _saved_files(root)}
    from datasets.data_files import DataFilesDict, get_data_patterns, sanitize_patterns

    config: dict[str, Any] = {}
    if not data_dir:
        config = _card_config(folder)
    root = (root / config.get("data_dir", "")).resolve()
    if "data_files" in config:
        patterns = sanitize_patterns(config["data_files"])
    else:
        patterns = get_data_patterns(str(root))
    matches = DataFilesDict.from_patterns(patterns, base_path=str(root), allowed_extensions=list(file_types))
    # A file may match several patterns of its split; without dict.fromkeys its rows would be read twice.
    return {str(split): [Path(name) for name in dict.fromkeys(names)] for split, names in matches.items() if names}


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a data set that `save_to_disk` wrote."""
    state = json.loads((folder / "state.json").read_text())
    return [folder / _inside(entry["filename"], "state.json") for entry in state["_data_files"]]


def _card_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of data files in the README of a folder, empty if there is none.

    Raises:
        ValueError: it names a file outside the folder, sets an unsupported key, or there is no default configuration.
    """
    import yaml
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData
    from huggingface_hub.repocard import metadata_load

    card: dict[str, Any] = {}
    if (folder / "README.md").is_file():
        card |= metadata_load(folder / "README.md") or {}
    if (folder / ".huggingface.yaml").is_file():
        card |= yaml.safe_load((folder / ".huggingface.yaml").read_text(encoding="utf-8")) or {}
    configs = MetadataConfigs.from_dataset_card_data(DatasetCardData(**card))
    for name, config in configs.items():
        # Patterns may be texts, lists of texts, or lists of objects with a split and a path.
        for pattern in _texts([config.get("data_files"), config.get("data_dir")]):
            _inside(pattern, f"the configuration {name!r} of its README")
        # An unknown key could change the rows (for example `features`), so it must not be ignored.
        if unknown := sorted(set(config) - _CONFIG_KEYS):
            raise ValueError(f"the configuration {name!r} of its README sets {unknown[0]!r}, which is not supported")
    chosen = configs.get_default_config_name()
    if configs and chosen is None:
        raise ValueError(
            f"its README has the configurations {', '.join(map(repr, configs))}, and none is the default; name a "
            "folder inside it as <folder>@<folder inside>"
        )
    if chosen is None:
        return {}
    return configs[chosen]


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in nested lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _inside(name: str, source: str) -> str:
    """Check that the name of a file is inside the folder, and return it.

    Raises:
        ValueError: the file is outside, or the name is a URL.
    """
    path = PurePosixPath(name)
    # The folder may come from the hub: a file outside could be any file of this machine.
    if path.is_absolute() or ".." in path.parts or ":" in name or name.startswith("~"):
        raise ValueError(f"{source} names {name!r}, which is outside of the folder; remove it")
    return name

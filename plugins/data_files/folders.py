"""The data files of a folder, by split: its own files, whatever is written in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from components.data.cells import kind_of
from components.data.readers import FILE_TYPES
from components.data.records import read_file
from components.net.hub import first_line
from plugins.data_files.quiet import quiet

_CONFIG_KEYS = {"data_files", "data_dir", "default", "description", "version"}


def read_folder(folder: Path, data_dir: str | None, split: str, label_key: str | None) -> list[Any]:
    """Return the rows of a split of a folder.

    Args:
        folder: with data files.
        data_dir: folder inside it that has the files; None: the folder itself.
        split: to read.
        label_key: see `read_records`.

    Raises:
        ValueError: it cannot be read, or has no such split.
    """
    place = folder / (data_dir or "")
    try:
        with quiet():
            files = folder_files(folder, data_dir, FILE_TYPES)
    except Exception as error:  # the library that knows the names of splits raises what it likes
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

    A folder that `save_to_disk` wrote lists its files. In others the names tell the splits, by the rules of `datasets`,
    unless the README names the files of each split. All must be inside the folder: addresses, absolute paths and `..`
    are refused. Symbolic links are the user's, and are followed. No code of the folder runs.

    Args:
        folder: with data files.
        data_dir: a folder inside it that has the files; then the README is not read.
        file_types: endings of the files that can be read; others are left alone.

    Raises:
        ValueError: a file outside is named, or there are several configurations and none is the default.
        OSError: there are no data files.
    """
    place = folder / (data_dir or "")
    if (place / "dataset_dict.json").is_file():
        splits = json.loads((place / "dataset_dict.json").read_text())["splits"]
        return {split: _saved_files(place / _inside(split, "dataset_dict.json")) for split in splits}
    if (place / "state.json").is_file() and (place / "dataset_info.json").is_file():
        return {"train": _saved_files(place)}
    from datasets.data_files import DataFilesDict, get_data_patterns, sanitize_patterns

    config = {} if data_dir else _card_config(folder)
    place = (place / config.get("data_dir", "")).resolve()
    patterns = sanitize_patterns(config["data_files"]) if "data_files" in config else get_data_patterns(str(place))
    matches = DataFilesDict.from_patterns(patterns, base_path=str(place), allowed_extensions=list(file_types))
    # One file may fit several patterns of its split.
    return {str(split): [Path(name) for name in dict.fromkeys(names)] for split, names in matches.items() if names}


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of one data set that `save_to_disk` wrote."""
    state = json.loads((folder / "state.json").read_text())
    return [folder / _inside(entry["filename"], "state.json") for entry in state["_data_files"]]


def _card_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of the data files in the README of a folder; empty if there is none."""
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
        for pattern in _texts([config.get("data_files"), config.get("data_dir")]):
            _inside(pattern, f"the configuration {name!r} of its README")
        if unknown := sorted(set(config) - _CONFIG_KEYS):
            raise ValueError(f"the configuration {name!r} of its README sets {unknown[0]!r}, which is not supported")
    chosen = configs.get_default_config_name()
    if configs and chosen is None:
        raise ValueError(
            f"its README has the configurations {', '.join(map(repr, configs))}, and none is the default; name a "
            "folder inside it as <folder>@<folder inside>"
        )
    return configs[chosen] if chosen is not None else {}


def _texts(value: Any) -> Iterator[str]:
    """All texts in lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _inside(name: str, source: str) -> str:
    """Return the name of a file inside a folder.

    Raises:
        ValueError: it is outside, or is an address.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or ":" in name or name.startswith("~"):
        raise ValueError(f"{source} names {name!r}, which is outside of the folder; take it out")
    return name

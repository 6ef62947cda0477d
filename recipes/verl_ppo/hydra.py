"""Hydra's command-line options, which are used besides verl's keys."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SHORT = {"-cp": "--config-path", "-cd": "--config-dir", "-cn": "--config-name"}
"""Hydra's short options."""


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of verl's configuration files, by file name."""
    return yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))


def preset(name: str) -> list[str]:
    """Return the settings of verl's configuration file of this name as arguments. Empty if it is unknown."""
    return [f"{key}={_text(value)}" for key, value in presets().get(name.removesuffix(".yaml"), {}).items()]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_config_file(arguments: Sequence[str]) -> list[str]:
    """Replace Hydra's configuration options by --config FILE, if the file exists. If it does not exist and verl ships a
    file of that name, insert its settings before all others.
    """
    arguments = [SHORT.get(word, word) for word in arguments]
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config-") else [word])]
    options = ("--config-path", "--config-dir", "--config-name")
    places = {name: words.index(name) for name in options if name in words[:-1]}
    if "--config-name" not in places:
        return arguments
    folder = next((words[place + 1] for name, place in places.items() if name != "--config-name"), None)
    name = words[places["--config-name"] + 1]
    file = Path(folder or "") / f"{name.removesuffix('.yaml')}.yaml"
    if folder is None or not file.is_file():
        return [*preset(name), *arguments]
    rest = [
        word for i, word in enumerate(words) if i not in {at for place in places.values() for at in (place, place + 1)}
    ]
    return ["--config", str(file), *rest]

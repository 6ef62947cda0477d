"""Hydra's command-line options, which are used besides verl's keys."""

import re
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


def preset(name: str) -> list[str] | None:
    """Return the settings of verl's configuration file of this name as arguments, or None if verl has none."""
    settings = presets().get(name.removesuffix(".yaml"))
    if settings is None:
        return None
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def with_config_file(arguments: Sequence[str]) -> list[str]:
    """Replace Hydra's configuration options by --config FILE, if the file exists. If it does not exist and verl ships a
    file of that name, insert its settings before all others.
    """
    arguments = [SHORT.get(word, word) for word in arguments]
    words: list[str] = []
    for word in arguments:
        if word.startswith("--config-"):
            words += word.split("=", 1)
        else:
            words.append(word)
    options = ("--config-path", "--config-dir", "--config-name")
    places = {name: words.index(name) for name in options if name in words[:-1]}
    if "--config-name" not in places:
        return arguments
    folder = next((words[place + 1] for name, place in places.items() if name != "--config-name"), None)
    name = words[places["--config-name"] + 1]
    file = Path(folder or "") / f"{name.removesuffix('.yaml')}.yaml"
    if folder is None or not file.is_file():
        return [*(preset(name) or []), *arguments]
    rest = [
        word for i, word in enumerate(words) if i not in {at for place in places.values() for at in (place, place + 1)}
    ]
    return ["--config", str(file), *rest]


def plain_arguments(arguments: Sequence[str]) -> list[str]:
    """Convert Hydra's syntax to that of `load_config`: remove + before keys, set keys after ~ to null, add blanks in
    mappings, and replace --config-path and --config-name by the file, if it exists.
    """
    plain = list[str]()
    # Hydra deletes the key after ~, with or without naming its value.
    written = [re.sub(r"^~([^=]*).*", r"\1=null", argument) for argument in with_config_file(arguments)]
    for argument in written:
        key, equals, value = argument.lstrip("+").partition("=")
        if len(value) > 1 and value[0] in "'\"" and value.find(value[0], 1) == len(value) - 1:
            value = value[1:-1]  # quotes that the shell has not removed
        if value.startswith(("{", "[{")) and not {"'", '"'} & set(value):  # Hydra also accepts {a:1}
            value = re.sub(r"([{,]\s*\w+):(?=\S)", r"\1: ", value)
        if key.strip():
            plain.append(f"{key}{equals}{value}")
    return plain

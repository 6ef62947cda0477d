"""Hydra's options of a command line, beside verl's keys."""

from collections.abc import Sequence
from pathlib import Path


def with_config_file(arguments: Sequence[str]) -> list[str]:
    """Name a Hydra configuration by its file, where that is there: --config FILE."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config-") else [word])]
    places = {name: words.index(name) for name in ("--config-path", "--config-name") if name in words[:-1]}
    if len(places) < 2:
        return list(arguments)
    folder, name = (words[place + 1] for place in places.values())
    file = Path(folder) / f"{name.removesuffix('.yaml')}.yaml"
    if not file.is_file():
        return list(arguments)
    rest = [
        word for i, word in enumerate(words) if i not in {at for place in places.values() for at in (place, place + 1)}
    ]
    return ["--config", str(file), *rest]

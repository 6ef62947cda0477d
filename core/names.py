"""Names that people bring along from DLRover and verl: one that was renamed or dropped says what to use instead."""

import functools
from pathlib import Path

from omegaconf import OmegaConf


@functools.cache
def old_names() -> dict[str, dict[str, str]]:
    """What to use instead of each, by where it stood."""
    return {str(place): dict(names) for place, names in OmegaConf.load(Path(__file__).with_name("names.yaml")).items()}


def hint_after(place: str, *names: str) -> str:
    """What follows "there is no ...": what to use instead of old names; empty where they are none."""
    known = old_names()[place]
    hints = [f"{name}: {known[name]}" for name in names if name in known]
    return f" ({'; '.join(hints)})" if hints else ""

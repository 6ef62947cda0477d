"""What is to be known of verl's keys beside the schema, from keys.yaml."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from training.schema import ConfigError

KEYS: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "keys.yaml").read_text(encoding="utf-8"))
"""Other names, keys that are not taken, and what is said of options that cannot work."""


def refuse(faults: Mapping[str, object], **values: Any) -> None:
    """Say of the first thing that is wrong what keys.yaml has to say of it.

    Raises:
        ConfigError: something is.
    """
    for name, is_wrong in faults.items():
        if is_wrong:
            raise ConfigError(KEYS["faults"][name].format(**values))


def renamed(text: str) -> str:
    """A sentence about the shared groups, in verl's keys."""
    for own, key in KEYS["groups"].items():
        text = re.sub(rf"(?<![\w.]){re.escape(own)}", key, text)
    return text

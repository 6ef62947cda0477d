"""verl's keys that are written as nested mappings, as its YAML files have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.options.table_adapter import Computed, as_value


def within(keys: Computed, *groups: str) -> dict[str, Any]:
    """Everything in these mappings, by its name there."""
    found: dict[str, Any] = {}
    for group in groups:
        for key, value in keys.given.items():
            if key == group:
                found |= _flat(value or {})
            elif key.startswith(f"{group}."):
                found |= _flat({key.removeprefix(f"{group}."): value})
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        whole = f"{prefix}{name}"
        found |= _flat(value, f"{whole}.") if isinstance(value, Mapping) else {whole: as_value(value)}
    return found

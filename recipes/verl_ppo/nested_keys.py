"""verl's keys that are written as nested mappings, as in its YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.options.table_adapter import Computed, as_value


def listed(value: Any) -> list[Any]:
    """Return a list unchanged, and any other value as a list of one item."""
    if isinstance(value, list):
        return value
    return [value]


def values_within(keys: Computed, *groups: str) -> dict[str, Any]:
    """Return the values of these mappings, by their dotted names relative to the mapping."""
    flat: dict[str, Any] = {}
    for group in groups:
        for key, value in keys.values.items():
            if key == group:
                flat |= _flat(value or {})
            elif key.startswith(f"{group}."):
                flat |= _flat({key.removeprefix(f"{group}."): value})
    return flat


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {key: as_value(value)}
    return flat

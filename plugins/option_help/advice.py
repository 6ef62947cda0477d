"""Advice on an option that a schema does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from plugins.option_help.groups import plugin_groups
from plugins.option_help.synonyms import answer
from training.options.schema import options_of, recipe_of


def advice(unknown: str, schema: Any, others: Collection[str] = ()) -> str:
    """Return what to use instead of an unknown option, as the end of a sentence.

    Args:
        unknown: the option as it was written.
        schema: the options of the command.
        others: further names that the command takes, of another system.
    """
    meanings = {option.name: option.meaning for option in options_of(schema)}
    return _group_advice(unknown, schema) or answer(unknown, meanings, recipe_of(schema), others)


def _group_advice(name: str, schema: Any) -> str:
    """Return what to set for an unknown option of a group that a plug-in would add to the schema; empty: of none."""
    condition, group = plugin_groups().get(name.partition(".")[0], ("", None))
    if group is None or group.GROUP in {field.name for field in dataclasses.fields(schema)}:
        return ""
    return f": {group.GROUP}.* are options with {condition}; set that as well, or leave {name} out"

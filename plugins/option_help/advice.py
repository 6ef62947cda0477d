"""Advice for an option name that a schema does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from plugins.option_help.groups import plugin_groups
from plugins.option_help.synonyms import answer
from training.options.described import options_of
from training.options.schema import recipe_of


def advice(unknown: str, schema: Any, others: Collection[str] = ()) -> str:
    """Return the option to use instead of an unknown one, as the end of an error message.

    Args:
        unknown: name of the option as the user wrote it.
        schema: the options of the command.
        others: further names that the command accepts, which come from another system.
    """
    meanings = {option.name: option.meaning for option in options_of(schema)}
    # A group that a plug-in adds comes first: its name is right, and a similar name would send the user elsewhere.
    return _group_advice(unknown, schema) or answer(unknown, meanings, recipe_of(schema), others)


def _group_advice(name: str, schema: Any) -> str:
    """Return the setting that adds the group of an unknown option, or an empty string if no plug-in adds the group."""
    condition, group = plugin_groups().get(name.partition(".")[0], ("", None))
    if group is None or group.GROUP in {field.name for field in dataclasses.fields(schema)}:
        return ""
    return f": {group.GROUP}.* are options with {condition}; set that as well, or leave {name} out"

"""Options that plug-ins add to a command line: names of another system, and groups of options.

A plug-in provides, in its PROVIDES (components/registry.py has the rest):

    "command adapter": {"openrlhf.train_dpo": "adapter:train_dpo"}
    "options": {"rollout.engine=theirs": "options:TheirOptions"}

A command adapter is a function without arguments that returns an `Adapter`. A schema names it in its class variable
ADAPTERS. It is loaded if the command line has names that are not in the schema. A group of options is a subclass of
`Options` with a GROUP. It is added to the schema of every recipe if the option before `=` has the value after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from components import registry
from training.options.adapter import as_text
from training.options.schema import Options

COMMAND_ADAPTER = "command adapter"
GROUPS = "options"

S = TypeVar("S")


def with_plugin_groups(schema: type[S], value: Callable[[str], Any]) -> type[S]:
    """Return the schema with the groups of options that plug-ins add for the values of a command line.

    Args:
        schema: dataclass of the options.
        value: returns the value that the user has written for an option, or None.
    """
    groups: list[tuple[str, type[Options], Any]] = []
    for condition in registry.names(GROUPS):
        option, _, expected = condition.partition("=")
        if as_text(value(option)) == expected.lower():
            group: type[Options] = registry.load(GROUPS, condition)
            groups.append((group.GROUP, group, dataclasses.field(default_factory=group)))
    if not groups:
        return schema
    # The module is copied, because `recipe_of` derives the name of the recipe from it.
    namespace = {"__module__": schema.__module__}
    return dataclasses.make_dataclass(schema.__name__, groups, bases=(schema,), namespace=namespace, kw_only=True)

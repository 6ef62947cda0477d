"""Options that plug-ins add to a command line: names of another system, and groups of options.

A plug-in provides, in its PROVIDES (components/registry.py has the rest):

    "command adapter": {"openrlhf.train_dpo": "adapter:train_dpo"}
    "options": {"rollout.engine=theirs": "options:TheirOptions"}

A command adapter is a function without arguments that returns an `Adapter`. A schema names it in its class variable
ADAPTERS, and it is loaded when a command line has names that the schema does not have. A group of options is a subclass
of `Options` with a GROUP; it is added to the schema of every recipe when the option before `=` is given that value.
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
        schema: a dataclass.
        value: returns the written value of an option, None for an option that is not written.
    """
    named: list[type[Options]] = []
    for condition in registry.names(GROUPS):
        option, _, expected = condition.partition("=")
        if as_text(value(option)) == expected.lower():
            named.append(registry.load(GROUPS, condition))
    if not named:
        return schema
    groups: list[tuple[str, type, Any]] = [
        (group.GROUP, group, dataclasses.field(default_factory=group)) for group in named
    ]
    # The name of the recipe follows from the module.
    namespace = {"__module__": schema.__module__}
    return dataclasses.make_dataclass(schema.__name__, groups, bases=(schema,), namespace=namespace, kw_only=True)

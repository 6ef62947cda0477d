"""Groups of options that plug-ins can add to a schema (training/options/plugin_options.py)."""

from __future__ import annotations

from components import registry
from training.options.plugin_options import GROUPS
from training.options.schema import Options


def plugin_groups() -> dict[str, tuple[str, type[Options]]]:
    """Return the groups of options that plug-ins can add: name -> (option and value that add the group, class)."""
    groups: dict[str, tuple[str, type[Options]]] = {}
    for condition in registry.names(GROUPS):
        group: type[Options] = registry.load(GROUPS, condition)
        groups[group.GROUP] = (condition, group)
    return groups

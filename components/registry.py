"""Registry of plug-ins, whose objects are loaded by kind and name, as the values of options set them.

A plug-in is a package in `plugins/`, or a package of another project with an entry point in the group
`troupe.plugins`. The `__init__` of the package imports nothing and lists the objects that the plug-in provides, as
`module:attribute` relative to the package:

    PROVIDES = {"rollout engine": {"vllm": "engine:VLLMRolloutEngine"}}

`load` imports an object. No module imports a plug-in in any other way, so that each can be deleted. The
package `agents` provides its parts in the same way, because a run without an agent needs none of them.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

GROUP = "troupe.plugins"
"""Entry-point group of other projects' plug-ins. The value of an entry point is the package."""
FOLDER = Path(__file__).resolve().parents[1] / "plugins"
"""Folder of this project's plug-ins."""
PACKAGE = ".".join([*__name__.split(".")[:-2], "plugins"])
"""Import name of that folder: `plugins` in a clone, `troupe.plugins` in an installed wheel."""
AGENTS = ".".join([*__name__.split(".")[:-2], "agents"])
"""Package outside of `plugins/` that provides its parts as a plug-in does."""


class MissingPlugin(ValueError):
    """Raised if no plug-in provides the object that an option names."""


@dataclass(frozen=True)
class Provided:
    """Reference to an object of a plug-in that is not imported yet."""

    package: str
    """Import name of the plug-in."""
    target: str
    """`module:attribute`, relative to the package."""

    def load(self) -> Any:
        """Import the object."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(f"{self.package}.{module}"), attribute)


def packages() -> list[str]:
    """Return the import names of all packages that provide something: the folders in `plugins/`, `agents`, then the
    packages of entry points.
    """
    folders = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
    installed = sorted({entry.value for entry in entry_points(group=GROUP)})
    return [*(f"{PACKAGE}.{name}" for name in folders), AGENTS, *installed]


@functools.cache
def _provided() -> dict[tuple[str, str], Provided]:
    """Return all objects of plug-ins by kind and name.

    Raises:
        ValueError: two plug-ins provide the same kind and name.
    """
    provided: dict[tuple[str, str], Provided] = {}
    for package in packages():
        # Importing the package is cheap: its __init__ imports nothing.
        table: dict[str, dict[str, str]] = getattr(importlib.import_module(package), "PROVIDES", {})
        for kind, targets in table.items():
            for name, target in targets.items():
                other = provided.setdefault((kind, name), Provided(package, target))
                # Which of the two is used must not depend on the order of entry points.
                if other.package != package:
                    raise ValueError(f"{other.package} and {package} both provide the {kind} {name!r}; remove one")
    return provided


def names(kind: str) -> list[str]:
    """Return the names that plug-ins provide for a kind, in the order of the plug-ins."""
    return [name for provided_kind, name in _provided() if provided_kind == kind]


def module_of(kind: str, name: str) -> str | None:
    """Return the import name of an object's module, without importing it, or None if no plug-in provides the object."""
    provided = _provided().get((kind, name))
    return provided and f"{provided.package}.{provided.target.partition(':')[0]}"


def find(kind: str, name: str) -> Any | None:
    """Import an object of a plug-in, or return None if no plug-in provides it."""
    provided = _provided().get((kind, name))
    return provided and provided.load()


def load(kind: str, name: str, option: str = "") -> Any:
    """Import an object of a plug-in; see `require`."""
    return require(kind, name, option).load()


def require(kind: str, name: str, option: str = "") -> Provided:
    """Return an object of a plug-in without importing it.

    Args:
        kind: kind of object, such as `rollout engine` or `weight carrier`.
        name: name of the object, such as `vllm`.
        option: option that names the object, for the error message. By default the kind. If the value of the option is
            not the name, the option is given with its value, such as `log.wandb=true`.

    Raises:
        MissingPlugin: no plug-in provides the object.
    """
    provided = _provided().get((kind, name))
    if provided is None:
        setting = f"{option or kind}={name}"
        target = "it"
        if "=" in option:
            setting = option
            target = f"the {kind} {name}"
        raise MissingPlugin(
            f"{setting}: no plug-in in {FOLDER.name}/ or among the installed packages provides {target}; "
            f"provided: {', '.join(names(kind)) or 'none'}"
        )
    return provided

"""Plug-ins: optional capabilities that the values of options load by kind and name.

A plug-in is a package in `plugins/`, or a package of another project with an entry point in the group
`troupe.plugins`. The `__init__` of the package imports nothing and lists what the plug-in provides, as
`module:attribute` relative to the package:

    PROVIDES = {"rollout engine": {"vllm": "engine:VLLMRolloutEngine"}}

`load` imports a provided object. No module imports a plug-in in any other way, so that each can be deleted. The package
`agents` provides its parts in the same way, since a run without an agent needs none of them.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

GROUP = "troupe.plugins"
"""Entry-point group of packages that bring plug-ins; the value of an entry point is the package."""
FOLDER = Path(__file__).resolve().parents[1] / "plugins"
PACKAGE = ".".join([*__name__.split(".")[:-2], "plugins"])
"""`plugins` in a clone, `troupe.plugins` where the wheel is installed."""
AGENTS = ".".join([*__name__.split(".")[:-2], "agents"])
"""Package outside of `plugins/` that provides its parts as a plug-in does."""


class MissingPlugin(ValueError):
    """Raised when no plug-in provides what an option names."""


@dataclass(frozen=True)
class Provided:
    """An object that a plug-in provides, not yet imported."""

    package: str
    """Import name of the plug-in."""
    target: str
    """`module:attribute`, relative to the package."""

    def load(self) -> Any:
        """Import the object."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(f"{self.package}.{module}"), attribute)


def packages() -> list[str]:
    """Import names of all packages that provide something: the folders in `plugins/`, `agents`, then the packages of
    entry points.
    """
    folders = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
    installed = sorted({entry.value for entry in entry_points(group=GROUP)})
    return [*(f"{PACKAGE}.{name}" for name in folders), AGENTS, *installed]


@functools.cache
def _provided() -> dict[tuple[str, str], Provided]:
    """Everything that plug-ins provide, by kind and name.

    Raises:
        ValueError: two plug-ins provide the same.
    """
    provided: dict[tuple[str, str], Provided] = {}
    for package in packages():
        table: dict[str, dict[str, str]] = getattr(importlib.import_module(package), "PROVIDES", {})
        for kind, targets in table.items():
            for name, target in targets.items():
                other = provided.setdefault((kind, name), Provided(package, target))
                if other.package != package:
                    raise ValueError(f"{other.package} and {package} both provide the {kind} {name!r}; remove one")
    return provided


def names(kind: str) -> list[str]:
    """Names that plug-ins provide for a kind, in the order of the plug-ins."""
    return [name for provided_kind, name in _provided() if provided_kind == kind]


def module_of(kind: str, name: str) -> str | None:
    """Import name of the module that a plug-in provides something from; None if no plug-in provides it. Nothing is
    imported.
    """
    provided = _provided().get((kind, name))
    return provided and f"{provided.package}.{provided.target.partition(':')[0]}"


def find(kind: str, name: str) -> Any | None:
    """Import what a plug-in provides, or return None if no plug-in provides it."""
    provided = _provided().get((kind, name))
    return provided.load() if provided else None


def load(kind: str, name: str, option: str = "") -> Any:
    """Import what a plug-in provides; see `require`."""
    return require(kind, name, option).load()


def require(kind: str, name: str, option: str = "") -> Provided:
    """Return what a plug-in provides. Nothing is imported.

    Args:
        kind: such as `rollout engine` or `weight carrier`.
        name: such as `vllm`.
        option: the option that names it, for the error; default: the kind. With a value, such as `log.wandb=true`,
            where the value is not the name.

    Raises:
        MissingPlugin: no plug-in provides it.
    """
    provided = _provided().get((kind, name))
    if provided is None:
        known = ", ".join(names(kind)) or "none"
        written, target = (option, f"the {kind} {name}") if "=" in option else (f"{option or kind}={name}", "it")
        raise MissingPlugin(
            f"{written}: no plug-in in {FOLDER.name}/ or among the installed packages provides {target}; "
            f"provided: {known}"
        )
    return provided

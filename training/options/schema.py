"""Schemas of options: dataclasses with a dataclass per group, and a docstring for each option."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from components.ranges import out_of_range

T = TypeVar("T")


class ConfigError(ValueError):
    """Raised for an invalid configuration of the user. The message says what to set."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclasses.dataclass(kw_only=True)
class Options:
    """A group of options, or a whole schema. All its errors are raised at once."""

    GROUP: ClassVar[str] = ""
    """Name of the group in the schema. Empty for the schema itself."""
    PLUGIN: ClassVar[str] = ""
    """Plug-in that all options of the group need. Empty if they need none."""

    def __init_subclass__(cls, group: str | None = None, plugin: str | None = None) -> None:
        """Set `GROUP` and `PLUGIN` of the subclass and its subclasses."""
        super().__init_subclass__()
        # None keeps the value of the base class: a recipe's subclass of a group stays in this group.
        cls.GROUP = cls.GROUP if group is None else group
        cls.PLUGIN = cls.PLUGIN if plugin is None else plugin

    def __post_init__(self) -> None:
        refuse(out_of_range(self, self.GROUP and f"{self.GROUP}."))
        refuse(self.faults())

    def faults(self) -> Iterator[str]:
        """Yield a message for each invalid value or combination of values, with the value to set instead.

        The ranges of numbers are checked separately. A subclass yields the messages of its base class first.
        """
        yield from ()


_collected: ContextVar[list[str] | None] = ContextVar("collected_errors", default=None)


@contextmanager
def collect_errors() -> Iterator[list[str]]:
    """Collect the errors of all options that are created in the block, instead of raising them."""
    errors: list[str] = []
    token = _collected.set(errors)
    try:
        yield errors
    finally:
        _collected.reset(token)


def refuse(faults: Iterable[str]) -> None:
    """Raise all errors at once, or add them to those of `collect_errors`.

    Raises:
        ConfigError: there is at least one error.
    """
    collected = _collected.get()
    if collected is not None:
        collected.extend(faults)
    elif unique_faults := list(dict.fromkeys(faults)):
        raise ConfigError(*unique_faults)


def errors_of(prefix: str, make: Callable[..., object], *arguments: Any, **options: Any) -> Iterator[str]:
    """Yield the message of the ValueError that `make` raises for these arguments, after a prefix."""
    try:
        make(*arguments, **options)
    except ValueError as error:
        yield f"{prefix}{error}"


PLUGIN = "plugin"
"""Key in the metadata of a field. Its value is the plug-in without which the option has no effect."""


def of_plugin(plugin: str, default: T, **others: Any) -> T:
    """Return the default of an option of a plug-in, which `--help` shows in a section of the plug-in.

    Args:
        plugin: name of the plug-in.
        default: default value of the option.
        others: see `active_when`.
    """
    return dataclasses.field(default=default, metadata={PLUGIN: plugin, **others})


def active_when(default: T, **others: Any) -> T:
    """Return the default of an option that has an effect only if other options of its group have these values.

    True means any value that is set, False means that no value is set, and a tuple means one of its items. See
    `idle_options`.
    """
    return dataclasses.field(default=default, metadata=others)


def idle_options(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of every option or group that has no effect in a configuration; see `active_when`."""
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        for other, expected in field.metadata.items():
            if other == PLUGIN:
                continue
            actual = operator.attrgetter(other)(config)
            is_active = bool(actual) == expected if isinstance(expected, bool) else actual in expected
            if not is_active and value != field.default:
                yield name, f"{prefix}{other}={actual}"
        if dataclasses.is_dataclass(value):
            yield from idle_options(value, f"{name}.")


def limit_note(notes: list[str] | None, option: str) -> Callable[[str], None] | None:
    """Return a function that appends a sentence about an option to `notes`, or None if `notes` is None."""
    return None if notes is None else lambda text: notes.append(f"{option}: {text}")


def without_effect(idle: Collection[tuple[bool, str, str]], set_options: Collection[str]) -> list[str]:
    """Return a note for each (has no effect, option, reason) whose option the user has set."""
    return [f"no effect of {name}: {why}" for is_idle, name, why in idle if is_idle and name in set_options]


def recipe_of(schema: type) -> str:
    """Return the name of the recipe of a schema: the folder of its file."""
    return Path(inspect.getfile(schema)).parent.name


def fields_of(schema: Any) -> dict[str, Any]:
    """Return the type of every field that holds a value, by dotted name."""
    return {key: kind for key, kind, _, _ in walk(schema)}


def without_none(kind: Any) -> Any:
    """Return a type without its `| None`."""
    if get_origin(kind) in (types.UnionType, typing.Union):
        kinds = [k for k in get_args(kind) if k is not type(None)]
        return kinds[0] if len(kinds) == 1 else kind
    return kind


def walk(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (dotted key, type, field, its class) of every field that holds a value, depth first."""
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = without_none(hints[field.name])
        if dataclasses.is_dataclass(kind):
            yield from walk(kind, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hints[field.name], field, schema


def at_home(path: str) -> str:
    """Expand `~` in a path, or in several paths joined by commas. Names on the hub are not changed."""
    parts = [str(Path(part).expanduser()) if part.startswith("~") else part for part in path.split(",")]
    return ",".join(parts)


def column_names(option: str | None) -> tuple[str, ...]:
    """Split a comma-separated list of column names."""
    return tuple(name.strip() for name in (option or "").split(",") if name.strip())

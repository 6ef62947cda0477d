"""Options as a user has written them, and names of other systems for the options of a schema.

`table_adapter.py` reads the names from a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

NO_VALUE = ("null", "???", "")
"""Texts of an option that is not set. `???` is a missing value in OmegaConf."""


@dataclass(frozen=True)
class Target:
    """The option of the schema that a name of another system means."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Value of the other system, in lower case -> value of the schema. Values that are equal in both are left out."""
    otherwise: str = ""
    """Reason for which values that are not in `values` are refused. Empty if they are used unchanged."""


@dataclass(frozen=True)
class WrittenOption:
    """An option as the user has written it."""

    name: str
    value: Any
    source: str = ""
    """Path of the configuration file. Empty for an option on the command line."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.source, self.name)))


@dataclass
class Translation:
    """Options under the names of the schema, with the errors and notes of their translation."""

    options: list[WrittenOption] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    """Option of the schema -> the name that the user has written."""

    def add(self, option: WrittenOption, written: str = "") -> None:
        """Add an option of the schema.

        Args:
            option: the option, under the name of the schema.
            written: name that the user has written. Default: the name of the schema.
        """
        self.options.append(option)
        self.written[option.name] = written or option.name


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Names of another system for options of a schema. An empty adapter only accepts the names of the schema.

    `TableAdapter` reads the names from a table. It can also compute an option from several names, and refuse names.
    """

    options: Mapping[str, Target] = field(default_factory=dict)

    @classmethod
    def of_names(cls, names: Mapping[str, str]) -> Adapter:
        """Return an adapter that only renames options.

        Args:
            names: name in the other system -> name in the schema.
        """
        return cls(options={name: Target(option) for name, option in names.items()})

    def kind_of(self, name: str, fields: Mapping[str, Any]) -> Any:
        """Return the type of the value of a name of this system, or None if the system has no such name."""
        target = self._target_of(name)
        if target is None:
            return None
        if target.values:
            # A switch may be written without a value, as `--packing`. Read as text, it would take the next word.
            return bool if target.values.keys() <= {"true", "false"} else str
        return fields.get(target.name, str)

    def names(self) -> set[str]:
        """Return all names of the system, without patterns."""
        return set(self.options)

    def ignores(self, name: str) -> bool:  # noqa: ARG002 - for a table
        """Return True for a name that is accepted and has no effect."""
        return False

    def translate(self, written: Iterable[WrittenOption]) -> Translation:
        """Rename options from the names of this system to those of the schema. Of equal names, the last one counts."""
        result = Translation()
        for option in written:
            target = self._target_of(option.name)
            if target is None:
                result.add(option)
            else:
                self._translate_one(option, target, result)
        return result

    def merged_with(self, other: Adapter) -> Adapter:
        """Return this adapter with the names of another one that it lacks."""
        options = {name: target for name, target in other.options.items() if self.kind_of(name, {}) is None}
        return replace(self, options={**options, **self.options})

    def renamed(self, text: str, written: Mapping[str, str]) -> str:
        """Replace the names of the schema in a message by those of this system, if the user has written any of these.

        Args:
            text: the message.
            written: option of the schema -> the name that the user has written.
        """
        other = {option: name for option, name in written.items() if name != option}
        # A user who writes only our names has never seen the other names, and could not use the message.
        if not other:
            return text
        usual = {target.name: name for name, target in reversed(list(self.options.items()))}
        names = usual | other
        return re.sub(r"(?<![\w.])[a-z_]+(\.[a-z_]+)*", lambda match: names.get(match[0], match[0]), text)

    def _target_of(self, name: str) -> Target | None:
        """Return the target of a name, or of an entry `NAME.key` if NAME is an option whose value is a mapping."""
        if name in self.options:
            return self.options[name]
        for mapping, target in self.options.items():
            if name.startswith(f"{mapping}.") and not target.values:
                return Target(target.name + name.removeprefix(mapping))
        return None

    def _translate_one(self, option: WrittenOption, target: Target, result: Translation) -> None:
        text = as_text(option.value)
        if target.otherwise and text not in (*target.values, *NO_VALUE):
            result.faults.append(f"{option}={text}: {target.otherwise}")
        elif text in NO_VALUE and text not in target.values:
            # The value is unset, so earlier ones do not count either.
            result.options = [earlier for earlier in result.options if earlier.name != target.name]
        else:
            value = target.values.get(text, option.value)
            result.add(WrittenOption(target.name, value, option.source), option.name)


def as_text(value: Any) -> str:
    """Return a value as text in lower case, as in tables. None becomes "null", and lists are joined with blanks."""
    if value is None:
        return "null"
    return " ".join(map(str, value)).lower() if isinstance(value, list | tuple) else str(value).lower()

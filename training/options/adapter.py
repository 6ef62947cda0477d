"""Options as a user writes them, and other systems' names for options of a schema. `table_adapter.py` has whole
tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

NO_VALUE = ("null", "???", "")
"""Values that mean that an option is not set."""


@dataclass(frozen=True)
class Target:
    """The option that a name stands for."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of the other system, in lower case -> values of the schema, for those that differ."""
    otherwise: str = ""
    """Reason for which all other values are refused. Empty if they are used unchanged."""


@dataclass(frozen=True)
class WrittenOption:
    """An option as the user has written it."""

    name: str
    value: Any
    source: str = ""
    """Path of its file. Empty: the command line."""

    def __str__(self) -> str:
        return f"{self.source}: {self.name}" if self.source else self.name


@dataclass
class Translation:
    """Options in the names of the schema, with the faults and notes of their translation."""

    options: list[WrittenOption] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    """Option of the schema -> the name by which it was written."""

    def add(self, option: WrittenOption, written: str = "") -> None:
        """Add an option of the schema.

        Args:
            option: in the schema's name.
            written: name by which it was written. Default: the schema's.
        """
        self.options.append(option)
        self.written[option.name] = written or option.name


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Names of another system for options of a schema. An empty one knows no names but the schema's.

    `TableAdapter` reads them from a table, and also computes options from several names and refuses others.
    """

    options: Mapping[str, Target] = field(default_factory=dict)

    @classmethod
    def of_names(cls, names: Mapping[str, str]) -> Adapter:
        """Return an adapter that only renames options.

        Args:
            names: name in the other system -> name in the schema.
        """
        return cls(options={name: Target(here) for name, here in names.items()})

    def kind_of(self, name: str, fields: Mapping[str, Any]) -> Any:
        """Return the type of the value of a name of this system, or None for another name."""
        target = self._target_of(name)
        if target is None:
            return None
        if target.values:
            return bool if target.values.keys() <= {"true", "false"} else str
        return fields.get(target.name, str)

    def names(self) -> set[str]:
        """Return all names of the system, without patterns."""
        return set(self.options)

    def ignores(self, name: str) -> bool:  # noqa: ARG002 - for a table
        """Return True for a name that is taken and has no effect."""
        return False

    def translate(self, written: Iterable[WrittenOption]) -> Translation:
        """Rename options written in this system's names, or in the schema's, to the schema's. Later options win."""
        result = Translation()
        for option in written:
            target = self._target_of(option.name)
            if target is None:
                result.add(option)
            else:
                self._translate_one(option, target, result)
        return result

    def over(self, other: Adapter) -> Adapter:
        """Return this adapter, with those names of another one that it does not know."""
        options = {name: target for name, target in other.options.items() if self.kind_of(name, {}) is None}
        return replace(self, options={**options, **self.options})

    def renamed(self, text: str, written: Mapping[str, str]) -> str:
        """Replace the schema's names in a sentence by this system's if the user has written any of those."""
        other = {option: name for option, name in written.items() if name != option}
        if not other:
            return text
        usual = {target.name: name for name, target in reversed(list(self.options.items()))}
        names = usual | other
        return re.sub(r"(?<![\w.])[a-z_]+(\.[a-z_]+)*", lambda match: names.get(match[0], match[0]), text)

    def _target_of(self, name: str) -> Target | None:
        """Return the target of a name, or of an entry `NAME.key` of a name that stands for a mapping."""
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
    """Return a value as it is compared with those of a table: in lower case, None as null, lists joined by blanks."""
    if value is None:
        return "null"
    return " ".join(map(str, value)).lower() if isinstance(value, list | tuple) else str(value).lower()

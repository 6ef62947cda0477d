"""Another system's names and values as the options of a schema: a table in YAML, and a function where there is
arithmetic.

    options:             # name there: name here
      pretrain: model.path
      param_dtype: {is: train.precision, values: {bf16: bf16, fp32: fp32}, else: use bf16}
      optim: {in: train, names: {lr: learning_rate}}  # optim.lr: train.learning_rate
    computed:            # name there: kind of its value; `compute` makes options of all of them together
      max_len: int
      float: [adam_beta1, adam_beta2]  # or a kind, and the names of that
    no_effect:           # taken; whoever names one is told why. The harmless value is let through without a word
      - {why: every step is logged, kind: int, harmless: 1, names: [logging_steps]}
    refused:             # not taken; `why` says what to use instead
      - {why: give one dataset, kind: text, names: [dataset_probs]}

A name of the last three may be a pattern, as `*.megatron.*`; of several the longest counts. The kind is that of the
value on the command line: switch, int, float, text, pair, list or mapping.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

KINDS: Mapping[str, Any] = {
    "switch": bool,
    "int": int,
    "float": float,
    "text": str,
    "pair": tuple[float, float],
    "list": list[str],
    "mapping": dict[str, Any],
}
NO_VALUE = ("null", "???", "")
"""What stands where an option is not set."""
UNSET = (*NO_VALUE, "{}", "[]")
"""Values that ask for nothing."""
MOST_NAMES = 8
"""So many names are in a note, at most: a file may have hundreds."""
ANY = "*"
"""The harmless value of what is never refused."""


@dataclass(frozen=True)
class Refused:
    """An option that users bring along from elsewhere: a schema knows it by name, and does not take it."""

    why: str
    """Why not, and what to use instead."""
    kind: Any = bool
    """The type of its value, as if it were a field: how many words belong to it follows from it."""
    harmless: str = ""
    """The value that asks for what happens anyway, and is let through; ANY: all are. A switch that is off always is."""

    def lets_through(self, value: Any) -> bool:
        """Whether the value asks for nothing that is missing here."""
        if isinstance(value, Mapping) and value:
            return all(self.lets_through(each) for each in value.values())
        text = as_text(value)
        off = text in UNSET or (self.kind is bool and text in ("false", "no", "off", "0"))
        if self.harmless in ("", ANY):
            return off or self.harmless == ANY
        return off or _as_number(text) == _as_number(self.harmless.lower())


@dataclass(frozen=True)
class Target:
    """The option that a name stands for."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values there that are called otherwise here, in lower case."""
    otherwise: str = ""
    """Why other values are refused. Default: they are taken as they are."""


@dataclass(frozen=True)
class Given:
    """An option as somebody wrote it."""

    name: str
    value: Any
    source: str = ""
    """The file that it is in; empty: the command line."""

    def __str__(self) -> str:
        return f"{self.source}: {self.name}" if self.source else self.name


@dataclass
class Translation:
    """What is written, in the names of the schema."""

    options: list[Given] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    """Option of the schema -> the name by which it was written."""


@dataclass
class Computed:
    """What `compute` makes of the options that it is handed."""

    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    """Option here -> what its value was written as."""


Compute = Callable[[Mapping[str, Any], Mapping[str, Any]], Computed]
"""(values of `computed` by name there, options so far by name here) -> options, notes and faults."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The table of a system. An empty one knows no names but the schema's."""

    options: Mapping[str, Target] = field(default_factory=dict)
    computed: Mapping[str, Any] = field(default_factory=dict)
    no_effect: Mapping[str, Refused] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)
    compute: Compute | None = None

    @classmethod
    def of_names(cls, names: Mapping[str, str]) -> Adapter:
        """One that knows only other names of options: name there -> name here."""
        return cls(options={there: Target(here) for there, here in names.items()})

    @classmethod
    def load(cls, path: Path, *sections: str, compute: Compute | None = None) -> Adapter:
        """Read a table; of one with sections these, of which a later one's names win."""
        # Every process of a run reads it; libyaml is ten times as fast where PyYAML was built with it.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        table = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
        chosen = [table[section] for section in sections] or [table]
        parts: dict[str, dict[str, Any]] = {"options": {}, "computed": {}, "no_effect": {}, "refused": {}}
        for section in chosen:
            parts["options"] |= _targets(section.get("options") or {})
            for name, kind in (section.get("computed") or {}).items():
                of_kind = dict.fromkeys(kind, KINDS[name]) if isinstance(kind, list) else {name: KINDS[kind]}
                parts["computed"] |= of_kind
            for part in ("no_effect", "refused"):
                for entry in section.get(part) or ():
                    parts[part] |= dict.fromkeys(entry["names"], _entry(entry, takes_all=part == "no_effect"))
        return cls(**parts, compute=compute)

    def kind_of(self, name: str, fields: Mapping[str, Any]) -> Any:
        """The type of the value of a name that this system has; None: it has none such."""
        if (target := self._target_of(name)) is not None:
            if target.values:
                return bool if target.values.keys() <= {"true", "false"} else str
            return fields.get(target.name, str)
        if (computed := self._computed_of(name)) is not None:
            is_entry = computed != name and self.computed[computed] == KINDS["mapping"]
            return str if is_entry else self.computed[computed]
        _, entry = self._entry_of(name)
        return None if entry is None else entry.kind

    def names(self) -> set[str]:
        """All names of the system, without patterns."""
        found = {*self.options, *self.computed, *self.no_effect, *self.refused}
        return {name for name in found if "*" not in name}

    def translate(self, given: Iterable[Given]) -> Translation:
        """What is written in this system's names, or in the schema's, in the latter. Later ones win."""
        found = Translation()
        raw: dict[str, Given] = {}
        after: list[Given] = []
        """Written in the schema's own names after all that is computed with."""
        idle: dict[str, list[str]] = {}
        for option in given:
            has_effect, entry = self._entry_of(option.name)
            if (target := self._target_of(option.name)) is not None:
                self._translate_one(option, target, found)
            elif self._computed_of(option.name) is not None:
                raw[option.name] = option
                after = []
            elif entry is None:
                found.options.append(option)
                found.written[option.name] = option.name
                after.append(option)
            elif entry.lets_through(option.value):
                continue
            elif has_effect:
                found.faults.append(f"{option}: {entry.why}")
            else:
                idle.setdefault(entry.why, []).append(option.name)
        found.notes += [f"no effect of {_some(list(dict.fromkeys(names)))}: {why}" for why, names in idle.items()]
        if raw and self.compute is not None:
            self._compute(raw, found, after)
        return found

    def renamed(self, text: str, written: Mapping[str, str]) -> str:
        """A sentence about options of the schema, in the names that the user writes: this system's, where any was."""
        other = {name: own for name, own in written.items() if own != name}
        if not other:
            return text
        usual = {target.name: name for name, target in reversed(list(self.options.items()))}
        names = usual | other
        return re.sub(r"(?<![\w.])[a-z_]+(\.[a-z_]+)*", lambda found: names.get(found[0], found[0]), text)

    def _target_of(self, name: str) -> Target | None:
        """Of a name, or of an entry `NAME.key` of one that is a mapping."""
        if name in self.options:
            return self.options[name]
        for there, target in self.options.items():
            if name.startswith(f"{there}.") and not target.values:
                return Target(target.name + name.removeprefix(there))
        return None

    def _computed_of(self, name: str) -> str | None:
        """A name or pattern of `computed`, or the mapping there of which it is an entry `NAME.key`."""
        if name in self.computed:
            return name
        mappings = (there for there, kind in self.computed.items() if kind == KINDS["mapping"])
        if (mapping := next((there for there in mappings if name.startswith(f"{there}.")), None)) is not None:
            return mapping
        own, other = _longest(name, self.computed), _longest(name, [*self.no_effect, *self.refused])
        return own if own and len(own) > len(other) else None

    def _translate_one(self, option: Given, target: Target, found: Translation) -> None:
        value = target.values.get(as_text(option.value), option.value)
        if target.otherwise and as_text(option.value) not in (*target.values, *NO_VALUE):
            found.faults.append(f"{option}={as_text(option.value)}: {target.otherwise}")
            return
        if value is option.value and as_text(value) in NO_VALUE:
            found.options = [earlier for earlier in found.options if earlier.name != target.name]
            return
        found.options.append(Given(target.name, value, option.source))
        found.written[target.name] = option.name

    def _compute(self, raw: Mapping[str, Given], found: Translation, after: Iterable[Given]) -> None:
        assert self.compute is not None
        values = {name: option.value for name, option in raw.items()}
        result = self.compute(values, {option.name: option.value for option in found.options})
        found.options += [Given(name, value) for name, value in result.options.items()]
        found.options += [option for option in after if option.name in result.options]
        found.notes += [self.renamed(note, found.written | result.written) for note in result.notes]
        found.faults = [*result.faults, *found.faults]
        found.written |= result.written
        if len(raw) == 1:
            found.written = dict.fromkeys(result.options, next(iter(raw))) | found.written

    def _entry_of(self, name: str) -> tuple[bool, Refused | None]:
        """Whether the name would have an effect, and what is said of it; None: this system has no such name."""
        parts = ((False, self.no_effect), (True, self.refused))
        for has_effect, entries in parts:
            if name in entries:
                return has_effect, entries[name]
        pattern = _longest(name, [*self.no_effect, *self.refused])
        return pattern in self.refused, self.no_effect.get(pattern) or self.refused.get(pattern)


def _longest(name: str, patterns: Iterable[str]) -> str:
    """The longest pattern that a name fits; empty: none."""
    fitting = (pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern))
    return max(fitting, key=len, default="")


def _some(names: list[str]) -> str:
    """All of a few names, and of many how many more there are."""
    shown = names if len(names) <= MOST_NAMES else names[: MOST_NAMES - 1]
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return ", ".join(shown) + more


def as_text(value: Any) -> str:
    """A value as it is compared with those of a table: in lower case, None as null, lists with blanks."""
    if value is None:
        return "null"
    return " ".join(map(str, value)).lower() if isinstance(value, list | tuple) else str(value).lower()


def _targets(found: Mapping[str, Any], there: str = "", here: str = "") -> dict[str, Target]:
    """Of every name, those within groups too."""
    targets: dict[str, Target] = {}
    for name, target in found.items():
        if isinstance(target, Mapping) and "names" in target:
            group = f"{target['in']}." if "in" in target else ""
            targets |= _targets(target["names"], f"{there}{name}.", group)
        else:
            own = _target(target)
            targets[f"{there}{name}"] = Target(f"{here}{own.name}", own.values, own.otherwise)
    return targets


def _target(found: str | Mapping[str, Any]) -> Target:
    if isinstance(found, str):
        return Target(found)
    values = {as_text(there): here for there, here in found.get("values", {}).items()}
    return Target(found["is"], values, found.get("else", ""))


def _entry(found: Mapping[str, Any], takes_all: bool) -> Refused:
    harmless = as_text(found["harmless"]) if "harmless" in found else ""
    kind = KINDS[found.get("kind", "switch" if not takes_all else "text")]
    return Refused(found["why"], kind, harmless)


def _as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text

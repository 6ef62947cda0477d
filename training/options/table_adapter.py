"""Names and values of another system for the options of a schema: a table in YAML, and a function for computed options.

    names:               # our option: its names in the other system
      model.path: pretrain actor.model_name_or_path
    options:             # name in the other system: our option. For other values, and for groups of names
      param_dtype: {is: train.precision, values: {bf16: bf16, fp32: fp32}, else: use bf16}
      optim: {in: train, lr: learning_rate}  # optim.lr: train.learning_rate
    computed:            # type: names in the other system. `compute` computes our options from all of them together
      int: [max_len, data.max_len]
    no_effect:           # accepted, with a note that gives the reason. There is no note for the value `harmless`
      - {why: every step is logged, harmless: 1, names: [logging_steps]}
    refused:             # an error, in which `why` says what to use instead
      - {why: give one dataset, names: [dataset_probs], switches: [mix_datasets]}
    defaults:            # our option: its default in the other system. Used if any name of that system is written
      train.lr_warmup_from_zero: true

A name in `computed`, `no_effect` and `refused` may be a pattern, such as `*.megatron.*`. If several patterns match, the
longest one counts. A switch may be written on the command line without a value.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from training.options.adapter import NO_VALUE, Adapter, Target, Translation, WrittenOption, as_text

KINDS: Mapping[str, Any] = {
    "switch": bool,
    "int": int,
    "float": float,
    "text": str,
    "pair": tuple[float, float],
    "numbers": list[float],
    "list": list[str],
    "mapping": dict[str, Any],
    "any": Any,
}
UNSET = (*NO_VALUE, "{}", "[]")
"""Texts of an option that is not set or empty."""
OFF = ("false", "no", "off", "0")
"""Texts of a switch that is off."""
MOST_NAMES = 8
"""Maximum number of names in a note, since a file may have hundreds."""
ANY = "*"
"""Value of `harmless` for a name that accepts all values."""


@dataclass(frozen=True)
class Refused:
    """An option of another system that is known by name, and is refused or has no effect."""

    why: str
    """Reason, and the option to use instead."""
    kind: Any = bool
    """Type of its value, which determines the number of values on the command line."""
    harmless: str = ""
    """Value that requests what a run does anyway, so that it is accepted. ANY accepts all values. By default only a
    switch that is off is accepted."""

    def lets_through(self, value: Any) -> bool:
        """Return True if the value requests nothing that is missing."""
        if isinstance(value, Mapping) and value:
            return all(self.lets_through(each) for each in value.values())
        text = as_text(value)
        if text in UNSET or self.harmless == ANY:
            return True
        # As numbers: 1, 1.0 and 1e0 are the same value, however the user writes it.
        if self.harmless:
            return _as_number(text) == _as_number(self.harmless)
        return self.kind is bool and text in OFF


@dataclass
class Computed:
    """Input of `compute`, and the options, notes and errors that it produces."""

    values: Mapping[str, Any]
    """Values of the names in `computed`, converted to their types. None if the user has written null."""
    known: Mapping[str, Any]
    """Options of the schema, with their values as the user has written them."""
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    """Option of the schema -> the name of the other system that its value comes from."""
    names: Collection[str] = ()
    """Names of the other system that the user has written."""

    def name(self, *names: str) -> str | None:
        """Return the first of these names that has a value, or None."""
        return next((name for name in names if self.values.get(name) is not None), None)

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these names that has one, or the default."""
        name = self.name(*names)
        if name is None:
            return default
        return self.values[name]

    def option(self, name: str, default: Any = None) -> Any:
        """Return the current value of an option of the schema, or the default if it is not set."""
        value = as_value(self.options.get(name, self.known.get(name)))
        if value is None:
            return default
        return value

    def put(self, option: str, value: Any, name: str = "") -> None:
        """Set an option of the schema. `name` is the name that the user has written its value for."""
        self.options[option] = value
        if name:
            self.written[option] = name

    def idle(self, why: str, *names: str) -> None:
        """Add a note that these names have no effect, for those that the user has written."""
        if idle_names := [name for name in names if name in self.values]:
            self.notes.append(f"no effect of {', '.join(idle_names)}: {why}")


Compute = Callable[[Computed], None]
"""Function that reads the values of a `Computed` and adds options, notes and faults to it."""


@dataclass(frozen=True, kw_only=True)
class TableAdapter(Adapter):
    """The adapter that a table describes. See the docstring of the module for its sections."""

    computed: Mapping[str, Any] = field(default_factory=dict)
    no_effect: Mapping[str, Refused] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    compute: Compute | None = None

    @classmethod
    def load(cls, path: Path, *sections: str, compute: Compute | None = None) -> TableAdapter:
        """Read a table from a YAML file.

        Args:
            path: path of the file.
            sections: keys of tables in the file, which are merged. Of equal names, that of the last section counts. By
                default the whole file is one table.
            compute: function that computes options from the names in `computed`.
        """
        # Every process of a run reads the table. libyaml is ten times as fast, if PyYAML was built with it.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        table = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
        chosen = [table[section] for section in sections] or [table]
        names = ("options", "computed", "no_effect", "refused", "defaults")
        parts: dict[str, dict[str, Any]] = {name: {} for name in names}
        for section in chosen:
            for option, names in section.get("names", {}).items():
                parts["options"] |= dict.fromkeys(names.split(), Target(option))
            parts["options"] |= _targets(section.get("options", {}))
            parts["defaults"] |= section.get("defaults", {})
            for kind, names in section.get("computed", {}).items():
                parts["computed"] |= dict.fromkeys(names, KINDS[kind])
            for part in ("no_effect", "refused"):
                parts[part] |= dict(_entries(section.get(part, ())))
        return cls(**parts, compute=compute)

    def kind_of(self, name: str, fields: Mapping[str, Any]) -> Any:
        """See `Adapter.kind_of`."""
        if self._target_of(name) is not None:
            return super().kind_of(name, fields)
        if (computed := self._computed_of(name)) is not None:
            kind = self.computed[computed]
            # An entry `name.key` of a mapping. Its type is not known, and `compute` gets the whole mapping.
            if computed != name and kind == KINDS["mapping"]:
                return str
            return kind
        _, entry = self._entry_of(name)
        return entry and entry.kind

    def names(self) -> set[str]:
        """See `Adapter.names`."""
        all_names = {*self.options, *self.computed, *self.no_effect, *self.refused}
        return {name for name in all_names if "*" not in name}

    def ignores(self, name: str) -> bool:
        """See `Adapter.ignores`."""
        return name in self.no_effect

    def translate(self, written: Iterable[WrittenOption]) -> Translation:
        """See `Adapter.translate`."""
        result = Translation()
        to_compute: dict[str, WrittenOption] = {}
        after_computed: list[WrittenOption] = []
        reasons: dict[str, list[str]] = {}
        """Reason -> names of the options that have no effect for this reason."""
        for option in written:
            has_effect, entry = self._entry_of(option.name)
            if (target := self._target_of(option.name)) is not None:
                self._translate_one(option, target, result)
            elif self._computed_of(option.name) is not None:
                to_compute[option.name] = option
                after_computed = []
            elif entry is None:
                result.add(option)
                after_computed.append(option)  # overrides options that are computed from names before it
            elif entry.lets_through(option.value):
                pass
            elif has_effect:
                result.faults.append(f"{option}: {entry.why}")
            else:
                reasons.setdefault(entry.why, []).append(option.name)
        for why, names in reasons.items():
            result.notes.append(f"no effect of {_shortened(list(dict.fromkeys(names)))}: {why}")
        has_other_names = any(written != name for name, written in result.written.items())
        if to_compute or has_other_names:
            self._compute(to_compute, result, after_computed)
            result.options = [WrittenOption(name, value) for name, value in self.defaults.items()] + result.options
        return result

    def _computed_of(self, name: str) -> str | None:
        """Return the name, pattern or mapping of `computed` that a name belongs to, or None."""
        if name in self.computed:
            return name
        for mapping, kind in self.computed.items():
            if kind == KINDS["mapping"] and name.startswith(f"{mapping}."):
                return mapping
        computed = _longest(name, self.computed)
        other = _longest(name, [*self.no_effect, *self.refused])
        # The longer pattern is the more specific one, so an exception can be written beside a general rule.
        if computed and len(computed) > len(other):
            return computed
        return None

    def _compute(
        self, to_compute: Mapping[str, WrittenOption], result: Translation, after: Iterable[WrittenOption]
    ) -> None:
        """Add the options that are computed from several names.

        Args:
            to_compute: options whose names are in `computed`.
            result: the options that are translated already.
            after: options under the names of the schema that were written after those. They override computed options.
        """
        if self.compute is None:
            return
        values: dict[str, Any] = {}
        known = {option.name: option.value for option in result.options}
        computed = Computed(values, known, names=set(result.written.values()))
        for name, option in to_compute.items():
            try:
                values[name] = _of_kind(option.value, self.computed[self._computed_of(name) or name])
            except ValueError:
                result.faults.append(f"{option}={as_text(option.value)}; set a number")
        self.compute(computed)
        result.options += [WrittenOption(name, value) for name, value in computed.options.items()]
        result.options += [option for option in after if option.name in computed.options]
        result.notes += [self.renamed(note, result.written | computed.written) for note in computed.notes]
        result.faults = [*computed.faults, *result.faults]
        result.written |= computed.written
        if len(to_compute) == 1:
            # Every computed option comes from this single name, so messages can name it.
            result.written = dict.fromkeys(computed.options, next(iter(to_compute))) | result.written

    def _entry_of(self, name: str) -> tuple[bool, Refused | None]:
        """Return True if the name is refused, else False, and its entry, which is None for an unknown name."""
        parts = ((False, self.no_effect), (True, self.refused))
        for has_effect, entries in parts:
            if name in entries:
                return has_effect, entries[name]
        pattern = _longest(name, [*self.no_effect, *self.refused])
        return pattern in self.refused, self.no_effect.get(pattern) or self.refused.get(pattern)


def _longest(name: str, patterns: Iterable[str]) -> str:
    """Return the longest pattern that a name matches, or an empty string."""
    fitting = (pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern))
    return max(fitting, key=len, default="")


def _shortened(names: list[str]) -> str:
    """Join names with commas. Of more than MOST_NAMES, show the first ones and the number of the others."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    # One less than allowed: " and 1 more" would take as much space as the last name.
    shown = names[: MOST_NAMES - 1]
    return f"{', '.join(shown)} and {len(names) - len(shown)} more"


def _targets(entries: Mapping[str, Any], prefix: str = "", here: str = "") -> dict[str, Target]:
    """Return the target of every name, including names within groups. A mapping without the key `is` is a group."""
    targets: dict[str, Target] = {}
    for name, target in entries.items():
        if isinstance(target, Mapping) and "is" not in target:
            group = ""
            if "in" in target:
                group = f"{target['in']}."
            options = {key: option for key, option in target.items() if key != "in"}
            targets |= _targets(options, f"{prefix}{name}.", group)
        else:
            option = _target(target)
            targets[f"{prefix}{name}"] = Target(f"{here}{option.name}", option.values, option.otherwise)
    return targets


def _target(entry: str | Mapping[str, Any]) -> Target:
    if isinstance(entry, str):
        return Target(entry)
    values = {as_text(value): option_value for value, option_value in entry.get("values", {}).items()}
    return Target(entry["is"], values, entry.get("else", ""))


def _entries(entries: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Refused]]:
    for entry in entries:
        harmless = as_text(entry.get("harmless", ""))
        for names, kind in (("names", str), ("switches", bool)):
            for name in entry.get(names, ()):
                yield name, Refused(entry["why"], kind, harmless)


def as_value(text: Any) -> Any:
    """Parse a text as YAML. Return None if it means that the option is not set. Other types are returned unchanged."""
    if not isinstance(text, str):
        return text
    if text in NO_VALUE:
        return None
    try:
        value = yaml.safe_load(text)
        # YAML reads 1e-6 as text, because the mantissa has no decimal point.
        if isinstance(value, str):
            return float(value)
        return value
    except (yaml.YAMLError, ValueError):
        return text


def _of_kind(value: Any, kind: Any) -> Any:
    """Convert a value to a type of KINDS. Return None if it means that the option is not set.

    Raises:
        ValueError: the value has another type.
    """
    if as_text(value) in NO_VALUE:
        return None
    if kind in (KINDS["pair"], KINDS["numbers"]):
        numbers = value
        if not isinstance(value, list | tuple):
            numbers = str(value).strip("[]()").replace(",", " ").split()
        return [float(number) for number in numbers]
    if kind in (str, int, float):
        return kind(str(value))
    return as_value(value)


def _as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text

"""Configuration: a dataclass is the schema; YAML files and the command line only hold differences to it.

Written as `key=value`, `--key=value` or `--key value`. How many values a `--key` takes follows from its field: a switch
none or one, a pair two, a list as many as there are, everything else one. Dashes in keys are read as underscores.

Two class variables of a schema add names of other systems: ADAPTER, an `Adapter` that is always there, and ADAPTERS,
names of adapters that plug-ins provide. A plug-in may also add a group of options; plugin_options.py has both. All
faults are reported at once.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components import registry
from components.net.hub import first_line
from training.options.adapter import Adapter, Translation, WrittenOption
from training.options.plugin_options import COMMAND_ADAPTER, with_plugin_groups
from training.options.schema import ConfigError, collect_errors, fields_of, without_none

T = TypeVar("T")

_ASSIGNMENT = re.compile(r"--|\+{0,2}([A-Za-z_][\w.-]*)=")
"""Begin of an option on the command line."""
_SWITCH_WORDS = {"true", "false", "yes", "no", "on", "off", "1", "0"}


def load_config(schema: type[T], arguments: Sequence[str]) -> T:
    """Return the configuration: the schema's defaults, then each `--config FILE`, then the other arguments.

    Raises:
        ConfigError: see `CommandLine.config`.
    """
    return CommandLine(schema, arguments).config()


class CommandLine(Generic[T]):
    """The options that a user has written: on the command line, and before it in the `--config FILE`s that it names."""

    def __init__(self, schema: type[T], arguments: Sequence[str]) -> None:
        """
        Args:
            schema: the options.
            arguments: the command line. `config` raises its errors.
        """
        self._vocabulary = Vocabulary.of(schema)
        self._read(arguments)
        if any(not self._vocabulary.is_field(option) for option in self._given):
            self._vocabulary = self._vocabulary.with_adapters()
            self._read(arguments)
        extended = with_plugin_groups(schema, self.value)
        if extended is not schema:
            self._vocabulary = replace(self._vocabulary, schema=extended)
            self._read(arguments)
        self.written = self._found.written
        """Option of the schema -> the name by which it was written."""
        self.named = {option.name for option in self._found.options}
        """The options that the user has named."""
        self.notes = self._found.notes
        """Notes about options that the user has set and that have no effect."""

    def _read(self, arguments: Sequence[str]) -> None:
        """Read the command line, and its files, with the names that are known by now."""
        words, self._faults = _read_arguments(self._vocabulary, arguments)
        self.files = [Path(option.value) for option in words if option.name == "config"]
        """Configuration files that the command line names."""
        self._given: list[WrittenOption] = []
        for path in self.files:
            try:
                self._given += self._vocabulary.read_file(path)
            except ConfigError as error:
                self._faults.append(str(error))
        self._given += [option for option in words if option.name != "config"]
        self._found = self._translated([])

    @property
    def schema(self) -> type[T]:
        """The schema, with the groups of options that plug-ins add."""
        return self._vocabulary.schema

    def start_from(self, options: Sequence[WrittenOption]) -> None:
        """Put other values than the schema's in places that the user does not name."""
        self._found = self._translated(options)

    def value(self, name: str) -> Any:
        """Return the value of an option as it is written, or None if it is not set."""
        return next((option.value for option in reversed(self._found.options) if option.name == name), None)

    def config(self) -> T:
        """Return the configuration.

        Raises:
            ConfigError: all errors at once: unknown keys (each with the nearest one), refused options, values of the
                wrong type, missing files, and what the schema itself refuses.
        """
        merged, faults = self._merged
        numbers = _numbers(_plain(merged))
        odd = [f"{name}={value}; set a finite number" for name, value in numbers if not math.isfinite(value)]
        faults = [*self._found.faults, *faults, *odd]
        config: Any = None
        if not odd:
            config, errors = _made(merged)
            faults += errors
        if faults:
            raise ConfigError(
                _listed([self._vocabulary.adapter.renamed(fault, self._found.written) for fault in faults])
            )
        return typing.cast(T, config)

    @functools.cached_property
    def changed(self) -> dict[str, Any]:
        """Return the options that differ from the schema's defaults: dotted name -> value as it is written."""
        usual = OmegaConf.structured(self.schema)
        merged = self._merged[0]
        values = {key: (OmegaConf.select(merged, key), OmegaConf.select(usual, key)) for key in fields_of(self.schema)}
        return {key: _plain(value) for key, (value, default) in values.items() if value != default}

    def renamed(self, text: str) -> str:
        """Replace the schema's names of options in a sentence by the names that the user has written."""
        return self._vocabulary.adapter.renamed(text, self.written)

    def _translated(self, before: Sequence[WrittenOption]) -> Translation:
        translation = self._vocabulary.translate([*before, *self._given])
        translation.faults += self._faults
        return translation

    @functools.cached_property
    def _merged(self) -> tuple[Any, list[str]]:
        """The schema with all written values, and an error for each value that does not fit."""
        merged, fields = OmegaConf.structured(self.schema), fields_of(self.schema)
        groups = {name.partition(".")[0] for name in fields if "." in name}
        for node in (merged, *(merged[group] for group in groups)):
            OmegaConf.set_readonly(node, False)  # as those of frozen dataclasses are
        faults: list[str] = []
        for option in self._found.options:
            if option.value == "???":
                faults.append(f"{option}=??? is no value; set one")
                continue
            try:
                value = _typed(option.value, without_none(fields.get(option.name)))
                OmegaConf.update(merged, option.name, value)
            except yaml.YAMLError as error:
                faults.append(f"{option}={option.value} is no YAML: {first_line(error)}")
            except OmegaConfBaseException as error:
                faults.append(f"{option}: {first_line(error)}")
        return merged, faults


@dataclass(frozen=True)
class Vocabulary:
    """The options of a schema, and other systems' names for them."""

    schema: Any
    adapter: Adapter

    @classmethod
    def of(cls, schema: Any) -> Vocabulary:
        """Return the vocabulary of a schema, with the names of its ADAPTER if it has one."""
        return cls(schema, getattr(schema, "ADAPTER", None) or Adapter())

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """The type of every option."""
        return fields_of(self.schema)

    def with_adapters(self) -> Vocabulary:
        """Add the names that plug-ins provide for the schema. Without these plug-ins it stays as it is."""
        adapter = self.adapter
        for name in getattr(self.schema, "ADAPTERS", ()):
            provided = registry.find(COMMAND_ADAPTER, name)
            adapter = adapter if provided is None else provided().over(adapter)
        return replace(self, adapter=adapter)

    def kind_of(self, name: str) -> Any:
        """Return the type of the value of a name, or None for an unknown name."""
        kind = self.adapter.kind_of(name, self.fields)
        if kind is None and self._is_entry(name):
            return Any
        return self.fields.get(name) if kind is None else kind

    def is_name(self, name: str) -> bool:
        """True if an option goes by this name."""
        return self.kind_of(name) is not None

    def is_field(self, option: WrittenOption) -> bool:
        """True if this is an option of the schema, an entry of one that is a mapping, or a whole group."""
        name = option.name
        is_whole = option.value is None or isinstance(option.value, Mapping)
        is_group = is_whole and any(field.startswith(f"{name}.") for field in self.fields)
        return name in self.fields or is_group or self._is_entry(name)

    def _is_entry(self, name: str) -> bool:
        """Return True if this is an entry of an option that is a mapping."""
        mappings = (field for field, kind in self.fields.items() if get_origin(without_none(kind)) is dict)
        return any(name.startswith(f"{mapping}.") for mapping in mappings)

    def read_file(self, path: Path) -> list[WrittenOption]:
        """Read all options of a configuration file.

        Raises:
            ConfigError: it cannot be read.
        """
        if not path.is_file():
            raise ConfigError(f"there is no configuration file {path}")
        try:
            content = OmegaConf.to_container(OmegaConf.load(path))
        except Exception as error:
            raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path} holds a list, not keys and values")
        leaves = _leaves(typing.cast(dict[str, Any], content), self.is_name)
        return [WrittenOption(name, value, str(path)) for name, value in leaves]

    def translate(self, written: Sequence[WrittenOption]) -> Translation:
        """Return the options in the names of the schema, with all faults."""
        interpolated, faults = _interpolate(self, written)
        result = self.adapter.translate(interpolated)
        unknown = [option for option in result.options if not self.is_field(option)]
        result.options = [option for option in result.options if option not in unknown]
        if unknown:
            advise = registry.find("option help", "advice")
            for option in unknown:
                advice = "" if advise is None else advise(option.name, self.schema, self.adapter.names())
                source = option.source and f"{option.source}: "
                result.faults.append(f"{source}unknown option {option.name!r}{advice}")
        result.faults += faults
        return result


def read_file(schema: Any, path: Path) -> list[WrittenOption]:
    """Read all options of a configuration file in the names of a schema.

    Raises:
        ConfigError: it cannot be read.
    """
    return Vocabulary.of(schema).read_file(path)


# --- the command line and files


def _read_arguments(vocabulary: Vocabulary, arguments: Sequence[str]) -> tuple[list[WrittenOption], list[str]]:
    """Return the options with their values, as text or lists of texts, in the names that the user has written."""
    options: list[WrittenOption] = []
    faults: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.strip("-") or not (equals or word.startswith("--")):
            words = [word, *itertools.takewhile(lambda later: not _ASSIGNMENT.match(later), rest)]
            del rest[: len(words) - 1]
            faults.append(f"cannot read {' '.join(words)!r} on the command line; write key=value or --key value")
            continue
        key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else name
        if equals:
            options.append(WrittenOption(key, value))
            continue
        try:
            following = _count_values(rest, lambda name: name == "config" or vocabulary.is_name(name))
            kind = str if key == "config" else vocabulary.kind_of(key)
            options.append(WrittenOption(key, _take_values(word, kind, rest, *following)))
        except ConfigError as error:
            faults.append(str(error))
    return options, faults


def _count_values(rest: Sequence[str], is_option: Callable[[str], bool]) -> tuple[int, int]:
    """Return the number of words before the next option: one that is known, and any word that looks like one.

    The value of a flag that takes one value may look like an option, as a path or a template does.
    """
    known = listed = 0
    for word in rest:
        assignment = _ASSIGNMENT.match(word)
        if word.startswith("--") or (assignment and is_option(assignment[1].replace("-", "_"))):
            break
        known += 1
        if assignment is None and listed == known - 1:
            listed += 1
    return known, listed


def _take_values(word: str, kind: Any, rest: list[str], following: int, listed: int) -> Any:
    """Remove the values of a flag from the words behind it, and return them.

    Args:
        word: the flag.
        kind: type of its value; None where the flag is unknown.
        rest: the words behind it.
        following: number of words before the next known option.
        listed: number of words before the next word that looks like an option; a list ends there.
    """
    kind = without_none(kind)
    if kind is bool:
        return rest.pop(0) if rest and rest[0].lower() in _SWITCH_WORDS else "true"
    if kind is None or get_origin(kind) is list:
        return [rest.pop(0) for _ in range(listed)]
    is_tuple = get_origin(kind) is tuple
    num_values = len(get_args(kind)) if is_tuple else 1
    following = listed if is_tuple else following
    if following < num_values:
        del rest[:following]
        raise ConfigError(f"{word} takes {num_values} value{'s' if num_values > 1 else ''}, but {following} follow")
    values = [rest.pop(0) for _ in range(num_values)]
    return values if is_tuple else values[0]


def _leaves(tree: Mapping[str, Any], is_option: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a tree that is no group; a mapping may be the value of an option."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not is_option(name):
            yield from _leaves(value, is_option, f"{name}.")
        else:
            yield name, value


def _interpolate(vocabulary: Vocabulary, written: Sequence[WrittenOption]) -> tuple[list[WrittenOption], list[str]]:
    """Replace each `${name}` by the value of that name: the written one, or the schema's default.

    Returns:
        The options, and the faults of those that cannot be read.
    """
    if not any("${" in str(option.value) for option in written):
        return list(written), []
    defaults = OmegaConf.to_container(OmegaConf.structured(vocabulary.schema))
    values: Any = OmegaConf.create(typing.cast(Any, defaults))
    faults: list[str] = []
    readable: list[WrittenOption] = []
    for option in written:
        try:
            OmegaConf.update(values, option.name, option.value, force_add=True)
            readable.append(option)
        except OmegaConfBaseException as error:
            faults.append(f"{option}={option.value}: {first_line(error)}")
    # A name may refer to a later one, so values are read once all of them are there.
    interpolated: list[WrittenOption] = []
    for option in readable:
        if "${" not in str(option.value) or vocabulary.adapter.ignores(option.name):
            interpolated.append(option)
            continue
        try:
            node = OmegaConf.select(values, option.name)
            value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
            interpolated.append(WrittenOption(option.name, value, option.source))
        except OmegaConfBaseException as error:
            faults.append(f"{option}={option.value}: {first_line(error)}")
    return interpolated, faults


# --- values, and what the schema makes of them


def _numbers(tree: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, value) of every number in a tree."""
    if isinstance(tree, float):
        yield prefix, tree
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    for key, value in items:
        yield from _numbers(value, f"{prefix}.{key}" if prefix else str(key))


def _made(merged: Any) -> tuple[Any, list[str]]:
    """Return the configuration, or None, and the errors of its groups and of the whole."""
    with collect_errors() as errors:
        try:
            return OmegaConf.to_object(merged), errors
        except Exception as error:
            if not errors and not isinstance(error, OmegaConfBaseException | ValueError):
                raise
            # A later check may fail because of an error that is already collected: report only the first ones.
            return None, errors or [first_line(error)]


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _typed(value: Any, kind: Any) -> Any:
    """Text of the command line as a YAML value, except where the field is text: a path may look like a number."""
    if isinstance(value, str) and value and (kind is not str or value == "null"):
        return OmegaConf.from_dotlist([f"value={value}"])["value"]
    return value


# --- messages


def _listed(faults: Iterable[str]) -> str:
    """Join errors to one message: a single one as a line, several as a list."""
    unique_faults = list(dict.fromkeys(faults))
    if len(unique_faults) == 1:
        return unique_faults[0]
    return "\n".join([f"{len(unique_faults)} things are in the way:", *(f"  - {fault}" for fault in unique_faults)])

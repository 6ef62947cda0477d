"""Configuration: a dataclass is the schema. YAML files and the command line only hold differences from its defaults.

Options are written as `key=value`, `--key=value` or `--key value`. The type of the field determines the number of
values after `--key`: none or one for a switch, two for a pair, all following values for a list, one for other types.
Dashes in keys are read as underscores.

Two class variables of a schema add names of other systems: ADAPTER, an `Adapter` that is always used, and ADAPTERS, the
names of adapters that plug-ins provide. A plug-in may also add a group of options; see plugin_options.py. All errors
are reported at once.
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
from training.options.adapter import Adapter, Translation, WrittenOption, as_text
from training.options.plugin_options import COMMAND_ADAPTER, with_plugin_groups
from training.options.schema import ConfigError, collect_errors, fields_of, without_none

T = TypeVar("T")

_ASSIGNMENT = re.compile(r"--|\+{0,2}([A-Za-z_][\w.-]*)=")
"""Beginning of an option on the command line. `+` and `++` are prefixes of Hydra."""
_SWITCH_WORDS = {"true", "false", "yes", "no", "on", "off", "1", "0"}


def load_config(schema: type[T], arguments: Sequence[str]) -> T:
    """Return the configuration: the defaults of the schema, overridden by each `--config FILE` and then by arguments.

    Raises:
        ConfigError: see `CommandLine.config`.
    """
    return CommandLine(schema, arguments).config()


class CommandLine(Generic[T]):
    """The options that a user has written on the command line, and in the files that `--config` names.

    Options on the command line override those of the files, in whatever order they are written.
    """

    def __init__(self, schema: type[T], arguments: Sequence[str]) -> None:
        """
        Args:
            schema: dataclass of the options.
            arguments: the command line. Its errors are raised by `config`.
        """
        self._vocabulary = Vocabulary.from_schema(schema)
        self._read(arguments)
        # The tables of other systems take a tenth of a second to load, so they are only read for a name of theirs.
        if any(not self._vocabulary.is_field(option) for option in self._given):
            self._vocabulary = self._vocabulary.with_adapters()
            self._read(arguments)
        extended = with_plugin_groups(schema, self.value)
        if extended is not schema:
            self._vocabulary = replace(self._vocabulary, schema=extended)
            self._read(arguments)
        self.written = self._found.written
        """Option of the schema -> the name that the user has written."""
        self.named = {option.name for option in self._found.options}
        """Names of the options that the user has set."""
        self.notes = self._found.notes
        """Notes about options that the user has set and that have no effect."""

    def _read(self, arguments: Sequence[str]) -> None:
        """Read the command line and its files, with the names of the current vocabulary."""
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
        """Set options of a preset. Options that the user has written override them."""
        self._found = self._translated(options)

    def value(self, name: str) -> Any:
        """Return the value of an option as the user has written it, or None if it is not set."""
        return next((option.value for option in reversed(self._found.options) if option.name == name), None)

    def is_on(self, name: str) -> bool:
        """Return True if the user has switched an option on. Its value is not checked yet."""
        return as_text(self.value(name)) in ("true", "yes", "on", "1")

    def config(self) -> T:
        """Return the configuration.

        Raises:
            ConfigError: all errors at once: unknown keys (each with the most similar known key), refused options,
                values of the wrong type, missing files, and errors of the checks of the schema.
        """
        merged, faults = self._merged
        # NaN and infinities pass comparisons such as `value < 0` of later checks, and would end in the optimizer.
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
        """Options that differ from the defaults of the schema: dotted name -> value."""
        usual = OmegaConf.structured(self.schema)
        merged = self._merged[0]
        values = {key: (OmegaConf.select(merged, key), OmegaConf.select(usual, key)) for key in fields_of(self.schema)}
        return {key: _plain(value) for key, (value, default) in values.items() if value != default}

    def renamed(self, text: str) -> str:
        """Replace the option names of the schema in a message by the names that the user has written."""
        return self._vocabulary.adapter.renamed(text, self.written)

    def _translated(self, before: Sequence[WrittenOption]) -> Translation:
        translation = self._vocabulary.translate([*before, *self._given])
        translation.faults += self._faults
        return translation

    @functools.cached_property
    def _merged(self) -> tuple[Any, list[str]]:
        """The schema with all written values, and an error message for each value of the wrong type."""
        merged, fields = OmegaConf.structured(self.schema), fields_of(self.schema)
        groups = {name.partition(".")[0] for name in fields if "." in name}
        for node in (merged, *(merged[group] for group in groups)):
            OmegaConf.set_readonly(node, False)  # nodes of frozen dataclasses are read-only
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
    """The options of a schema, and the names of other systems for them."""

    schema: Any
    adapter: Adapter

    @classmethod
    def from_schema(cls, schema: Any) -> Vocabulary:
        """Return the vocabulary of a schema, with the names of its ADAPTER if it has one."""
        return cls(schema, getattr(schema, "ADAPTER", None) or Adapter())

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """The type of every option."""
        return fields_of(self.schema)

    def with_adapters(self) -> Vocabulary:
        """Return a vocabulary with the additional names that plug-ins provide for the schema."""
        adapter = self.adapter
        for name in getattr(self.schema, "ADAPTERS", ()):
            if (provided := registry.find(COMMAND_ADAPTER, name)) is not None:
                adapter = provided().merged_with(adapter)
        return replace(self, adapter=adapter)

    def kind_of(self, name: str) -> Any:
        """Return the type of the value of a name, or None for an unknown name."""
        kind = self.adapter.kind_of(name, self.fields)
        if kind is None and self._is_entry(name):
            return Any
        return kind or self.fields.get(name)

    def is_name(self, name: str) -> bool:
        """Return True if this is the name of an option, in the schema or in another system."""
        return self.kind_of(name) is not None

    def is_field(self, option: WrittenOption) -> bool:
        """Return True for an option of the schema, for an entry of an option that is a mapping, and for a group."""
        name = option.name
        is_whole = option.value is None or isinstance(option.value, Mapping)
        is_group = is_whole and any(field.startswith(f"{name}.") for field in self.fields)
        return name in self.fields or is_group or self._is_entry(name)

    def _is_entry(self, name: str) -> bool:
        """Return True if the name is `option.key`, where the option is a mapping."""
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
            raise ConfigError(f"{path} holds a list; write keys and values")
        leaves = _leaves(typing.cast(dict[str, Any], content), self.is_name)
        return [WrittenOption(name, value, str(path)) for name, value in leaves]

    def translate(self, written: Sequence[WrittenOption]) -> Translation:
        """Return the options under the names of the schema, with all errors."""
        interpolated, faults = _interpolate(self, written)
        result = self.adapter.translate(interpolated)
        unknown = [option for option in result.options if not self.is_field(option)]
        result.options = [option for option in result.options if option not in unknown]
        if unknown:
            # The suggestion of a similar name comes from a plug-in. The error is complete without it.
            advise = registry.find("option help", "advice") or (lambda *_: "")
            for option in unknown:
                advice = advise(option.name, self.schema, self.adapter.names())
                source = option.source and f"{option.source}: "
                result.faults.append(f"{source}unknown option {option.name!r}{advice}")
        result.faults += faults
        return result


# --- the command line and files


def _read_arguments(vocabulary: Vocabulary, arguments: Sequence[str]) -> tuple[list[WrittenOption], list[str]]:
    """Return the options under the names that the user has written, and errors. Values are texts or lists of texts."""
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
    """Return the number of words before the next known option, and before the next word that looks like an option.

    The two differ because a value, such as a path or a template, may contain `=` and then looks like an option.
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
    """Remove the values of a flag from the words after it, and return them.

    Args:
        word: the flag.
        kind: type of its value, or None for an unknown flag.
        rest: words after the flag.
        following: number of words before the next known option.
        listed: number of words before the next word that looks like an option. A list ends there.
    """
    kind = without_none(kind)
    if kind is bool:
        return rest.pop(0) if rest and rest[0].lower() in _SWITCH_WORDS else "true"
    if kind is None or get_origin(kind) is list:
        return [rest.pop(0) for _ in range(listed)]
    num_values = 1
    if get_origin(kind) is tuple:
        num_values = len(get_args(kind))
        following = listed
    if following < num_values:
        # Removed, so that the next error is about the next option and not about these words.
        del rest[:following]
        raise ConfigError(f"{word} needs {num_values} value(s), but {following} follow")
    values = [rest.pop(0) for _ in range(num_values)]
    return values if get_origin(kind) is tuple else values[0]


def _leaves(tree: Mapping[str, Any], is_option: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every option in a tree of groups. The value of an option may be a mapping."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not is_option(name):
            yield from _leaves(value, is_option, f"{name}.")
        else:
            yield name, value


def _interpolate(vocabulary: Vocabulary, written: Sequence[WrittenOption]) -> tuple[list[WrittenOption], list[str]]:
    """Replace each `${name}` by the value of that name: the written one, or the schema's default.

    Returns:
        The options, and errors of those whose values cannot be read.
    """
    # Most commands have no `${name}`, and the tree of all defaults takes time to build.
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
    # A name may refer to an option that is written later, so all values are set before the first one is read.
    interpolated: list[WrittenOption] = []
    for option in readable:
        if "${" not in str(option.value) or vocabulary.adapter.ignores(option.name):
            interpolated.append(option)
            continue
        try:
            value = _plain(OmegaConf.select(values, option.name), resolve=True)
            interpolated.append(WrittenOption(option.name, value, option.source))
        except OmegaConfBaseException as error:
            faults.append(f"{option}={option.value}: {first_line(error)}")
    return interpolated, faults


# --- values, and the configuration that the schema makes of them


def _numbers(tree: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (dotted name, value) of every number in a tree."""
    if isinstance(tree, float):
        yield prefix, tree
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    for key, value in items:
        yield from _numbers(value, f"{prefix}.{key}".removeprefix("."))


def _made(merged: Any) -> tuple[Any, list[str]]:
    """Return the configuration and no errors, or None and the errors of all groups and of the whole configuration."""
    with collect_errors() as errors:
        try:
            return OmegaConf.to_object(merged), errors
        except Exception as error:
            if not errors and not isinstance(error, OmegaConfBaseException | ValueError):
                raise
            # A later check may fail because of an error that is already collected: report only the first ones.
            return None, errors or [first_line(error)]


def _plain(value: Any, resolve: bool = False) -> Any:
    return OmegaConf.to_container(value, resolve=resolve) if OmegaConf.is_config(value) else value


def _typed(value: Any, kind: Any) -> Any:
    """Parse a text of the command line as YAML, except for a field of type str, since a path may look like a number."""
    if isinstance(value, str) and value and (kind is not str or value == "null"):
        return OmegaConf.from_dotlist([f"value={value}"])["value"]
    return value


# --- messages


def _listed(faults: Iterable[str]) -> str:
    """Join errors to one message. A single error is one line, several are a list."""
    unique_faults = list(dict.fromkeys(faults))
    if len(unique_faults) == 1:
        return unique_faults[0]
    return "\n".join([f"{len(unique_faults)} errors in the options:", *(f"  - {fault}" for fault in unique_faults)])

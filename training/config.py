"""Configuration: a dataclass is the schema; YAML files and the command line only hold differences to it.

Written as `key=value`, `--key=value` or `--key value`. How many values a `--key` takes follows from its field: a switch
none or one, a pair two, a list as many as there are, everything else one. Dashes in keys are read as underscores.

Two class variables of a schema serve people who come with a command line of another system: `ALIASES`, other names of
its options, and `REFUSED`, options that it knows but does not take, each with the reason.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import operator
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """The user's configuration cannot work; the message says what to set."""


T = TypeVar("T")

_SWITCH_WORDS = {"true", "false", "yes", "no", "on", "off", "1", "0"}

ANY = "*"
"""See `Refused.harmless`."""


@dataclasses.dataclass(frozen=True)
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
        text = " ".join(value) if isinstance(value, list) else str(value)
        off = self.kind is bool and text.lower() in ("false", "no", "off", "0")
        if self.harmless in ("", ANY):
            return off or self.harmless == ANY
        return off or _as_number(text.lower()) == _as_number(self.harmless.lower())


def where(default: T, **others: Any) -> T:
    """The default of an option that has an effect only where others of its group have these values: True is any that
    is set, False none, and a tuple any of its items. For `idle_options`.
    """
    return dataclasses.field(default=default, metadata=others)


def idle_options(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, why) of every option, or whole group, that has no effect in a configuration, as its `where` says."""
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        for other, wanted in field.metadata.items():
            found = operator.attrgetter(other)(config)
            is_wanted = bool(found) == wanted if isinstance(wanted, bool) else found in wanted
            if not is_wanted:
                yield name, f"{prefix}{other}={found}"
        if dataclasses.is_dataclass(value):
            yield from idle_options(value, f"{name}.")


def _as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def load_config(schema: type[T], arguments: Sequence[str], files: Sequence[Path] = ()) -> T:
    """The configuration: the schema's defaults, then `files`, then each `--config FILE`, then the other arguments.

    Raises:
        ConfigError: an unknown key (with the nearest one), a value of the wrong kind, a file that is not there, or
            whatever the schema's own `__post_init__` refuses.
    """
    merged = _merged(schema, arguments, files)
    try:
        return typing.cast(T, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def changed_options(schema: type, arguments: Sequence[str], files: Sequence[Path] = ()) -> dict[str, Any]:
    """What `load_config` would set to something else than the schema's default, by dotted name: as it is written,
    before the schema makes anything of it.
    """
    found, usual = _merged(schema, arguments, files), OmegaConf.structured(schema)
    values = {key: (OmegaConf.select(found, key), OmegaConf.select(usual, key)) for key in _fields(schema)}
    return {key: _plain(value) for key, (value, default) in values.items() if value != default}


def _merged(schema: type, arguments: Sequence[str], files: Sequence[Path]) -> Any:
    pairs = parse_arguments(schema, arguments)
    paths = [*files, *(Path(value) for key, value in pairs if key == "config")]
    merged = OmegaConf.structured(schema)
    known = _fields(schema)
    for path in paths:
        merged = _merge(merged, _file_pairs(schema, path), known, str(path))
    return _merge(merged, [pair for pair in pairs if pair[0] != "config"], known, "the command line")


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def given_options(schema: type, arguments: Sequence[str]) -> set[str]:
    """The options that a user has named: on the command line, or in a `--config FILE`."""
    pairs = parse_arguments(schema, arguments)
    files = [_file_pairs(schema, Path(value)) for key, value in pairs if key == "config"]
    return {key for found in (pairs, *files) for key, _ in found}


def refused_options(schema: Any, arguments: Sequence[str]) -> set[str]:
    """What a user has named, there or there, of the options that the schema refuses: those that were let through."""
    pairs = _written(schema, arguments)
    files = [_leaves(_read_yaml(Path(value)), _known(schema)) for key, value in pairs if key == "config"]
    return {key for found in (pairs, *files) for key, _ in found if key in schema.REFUSED}


class Option(NamedTuple):
    """One option of a schema, as people are told about it."""

    name: str
    kind: str
    default: Any
    meaning: str


def options_of(schema: type) -> list[Option]:
    """Every option with its type, default and meaning, in the order of the schema."""
    return [
        Option(key, _shown(kind), _default(schema, key), _meanings(owner).get(field.name, ""))
        for key, kind, field, owner in _walk(schema)
    ]


def describe_options(schema: type) -> str:
    """The text of `--help`."""
    lines = ["Options, written key=value or --key value; --config FILE reads them from YAML:", ""]
    for option in options_of(schema):
        lines.append(f"--{option.name}  ({option.kind}, default {option.default!r})")
        lines += textwrap.wrap(option.meaning, 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _shown(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _default(schema: type, key: str) -> Any:
    first, *rest = key.split(".")
    field: Any = next(field for field in dataclasses.fields(schema) if field.name == first)
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    # A group may be given other defaults than its class has.
    return functools.reduce(getattr, rest, value)


@functools.cache
def _meanings(schema: type) -> dict[str, str]:
    """The string under each field of a dataclass, which Python itself does not keep."""
    bases = [base for base in schema.__bases__ if dataclasses.is_dataclass(base)]
    found = {name: text for base in reversed(bases) for name, text in _meanings(base).items()}
    definition = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]
    assert isinstance(definition, ast.ClassDef)
    for pair in itertools.pairwise(definition.body):
        match pair:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                found[name] = " ".join(text.split())
    return found


def parse_arguments(schema: type, arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """(dotted key, value) of each argument, in order; values are still text, or lists of texts.

    Raises:
        ConfigError: an argument is no option, has too few values, or is one that the schema refuses; all of these last
            are named at once.
    """
    return _translated(schema, _written(schema, arguments))


def _written(schema: type, arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """The same under the names that the user has written, with what is refused."""
    known = _known(schema) | {"config": str}
    pairs: list[tuple[str, Any]] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else name
        if not equals and not word.startswith("--"):
            raise ConfigError(f"cannot read {word!r} on the command line; write key=value or --key value")
        if _holder(key, known) is None and not _is_group(key, known):
            raise ConfigError(f"unknown option {word.split('=')[0]!r}{_nearest(key, known)}")
        pairs.append((key, value if equals else _take_values(word, known.get(key, str), rest)))
    return pairs


def _known(schema: Any) -> dict[str, Any]:
    """Every name that can be written, with the type of its value: fields, their other names, and what is refused."""
    fields = _fields(schema)
    aliases = {name: fields[field] for name, field in getattr(schema, "ALIASES", {}).items()}
    return fields | aliases | {name: refused.kind for name, refused in getattr(schema, "REFUSED", {}).items()}


def _translated(schema: Any, pairs: Iterable[tuple[str, Any]], where: str = "") -> list[tuple[str, Any]]:
    """The same under the fields' own names, without what is refused."""
    aliases: Mapping[str, str] = getattr(schema, "ALIASES", {})
    refused: Mapping[str, Refused] = getattr(schema, "REFUSED", {})
    known = _known(schema)
    faults, found = [], []
    for key, value in pairs:
        name = _holder(key, known) or key
        if name not in refused:
            found.append((aliases.get(name, name) + key.removeprefix(name), value))
        elif not refused[name].lets_through(value):
            faults.append(f"{name}: {refused[name].why}")
    if faults:
        raise ConfigError(f"{where}not available here: {'; '.join(dict.fromkeys(faults))}")
    return found


def _holder(key: str, known: Mapping[str, Any]) -> str | None:
    """The name that a key is, or of whose mapping it names an entry."""
    if key in known:
        return key
    mappings = (name for name, kind in known.items() if get_origin(_without_none(kind)) is dict)
    return next((name for name in mappings if key.startswith(f"{name}.")), None)


def _take_values(word: str, kind: Any, rest: list[str]) -> Any:
    kind = _without_none(kind)
    if kind is bool:
        return rest.pop(0) if rest and rest[0].lower() in _SWITCH_WORDS else "true"
    following = 0
    while following < len(rest) and not rest[following].startswith("--"):
        following += 1
    if get_origin(kind) is list:
        return [rest.pop(0) for _ in range(following)]
    wanted = len(get_args(kind)) if get_origin(kind) is tuple else 1
    if following < wanted:
        raise ConfigError(f"{word} takes {wanted} value{'s' if wanted > 1 else ''}, but {following} follow")
    values = [rest.pop(0) for _ in range(wanted)]
    return values if get_origin(kind) is tuple else values[0]


def _walk(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """(dotted key, type, field, its class) of every field that holds a value, depth first."""
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = _without_none(hints[field.name])
        if dataclasses.is_dataclass(kind):
            yield from _walk(kind, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hints[field.name], field, schema


def _fields(schema: Any) -> dict[str, Any]:
    """The type of every field that holds a value, by dotted key."""
    return {key: kind for key, kind, _, _ in _walk(schema)}


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (types.UnionType, typing.Union):
        kinds = [k for k in get_args(kind) if k is not type(None)]
        return kinds[0] if len(kinds) == 1 else kind
    return kind


def _is_group(key: str, known: Mapping[str, Any]) -> bool:
    return any(other.startswith(f"{key}.") for other in known)


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    last = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    found = near or last[:1]
    return f"; did you mean {found[0]!r}?" if found else f"; the options are {', '.join(sorted(known))}"


def _merge(base: Any, pairs: Iterable[tuple[str, Any]], known: Mapping[str, Any], source: str) -> Any:
    given: dict[str, Any] = {}
    for key, value in pairs:
        if _holder(key, known) is None and not _is_group(key, known):
            raise ConfigError(f"{source}: unknown option {key!r}{_nearest(key, known)}")
        try:
            _put(given, key, _typed(value, _without_none(known.get(key))))
        except yaml.YAMLError as error:
            raise ConfigError(f"{source}: {key}={value} is no YAML: {_first_line(error)}") from error
    try:
        return OmegaConf.merge(base, OmegaConf.create(given))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{source}: {f'{key}: ' if key else ''}{_first_line(error)}") from error


def _leaves(given: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of everything in a tree that is no group; a mapping may be the value of a field."""
    found: list[tuple[str, Any]] = []
    for key, value in given.items():
        name = f"{prefix}{key}"
        is_group = isinstance(value, Mapping) and value and name not in known
        found += _leaves(value, known, f"{name}.") if is_group else [(name, value)]
    return found


def _typed(value: Any, kind: Any) -> Any:
    """Text of the command line as a YAML value, except where the field is text: a path may look like a number."""
    if isinstance(value, str) and value and (kind is not str or value == "null"):
        return OmegaConf.from_dotlist([f"value={value}"])["value"]
    return value


def _put(target: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    for group in groups:
        target = target.setdefault(group, {})
    target[last] = value


def _file_pairs(schema: type, path: Path) -> list[tuple[str, Any]]:
    """(dotted key, value) of everything in a configuration file."""
    return _translated(schema, _leaves(_read_yaml(path), _known(schema)), f"{path}: ")


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no configuration file {path}")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a list, not keys and values")
    return typing.cast(dict[str, Any], content)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]

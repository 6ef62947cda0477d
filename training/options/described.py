"""Options of a schema with their types, defaults and meanings, as `--help` shows them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
from typing import Any, NamedTuple, get_args

from components.registry import names
from training.options.schema import PLUGIN, walk

_NAMES_OF = re.compile(r"<names of ([a-z ]+)>")


class Option(NamedTuple):
    """One option of a schema, as `--help` shows it."""

    name: str
    kind: str
    default: Any
    meaning: str
    plugin: str = ""
    """Plug-in that the option needs. Empty if it needs none."""
    is_own: bool = False
    """True if the option is defined in the file of the schema, False if it is one of the options that schemas share."""


def options_of(schema: type, prefix: str = "") -> list[Option]:
    """Return every option with its type, default and meaning, in the order of the schema.

    Args:
        schema: dataclass of the options.
        prefix: text before each name.
    """
    options: list[Option] = []
    for key, kind, field, owner in walk(schema):
        meaning = _with_names(_meanings(owner).get(field.name, ""))
        plugin = field.metadata.get(PLUGIN) or getattr(owner, PLUGIN.upper(), "")
        # Of the class itself: an inherited option is defined in the file of its base class, and shared by its recipes.
        is_own = owner.__module__ == schema.__module__ and field.name in inspect.get_annotations(owner)
        options.append(Option(f"{prefix}{key}", _shown(kind), _default(schema, key), meaning, plugin, is_own))
    return options


def describe(option: Option) -> list[str]:
    """Return the lines that describe an option in `--help`."""
    head = f"--{option.name}  ({option.kind}, default {option.default!r})"
    return [head, *textwrap.wrap(option.meaning, 100, initial_indent="    ", subsequent_indent="    ")]


def _with_names(meaning: str) -> str:
    """Replace `<names of KIND>` by the names that plug-ins provide for a kind."""
    return _NAMES_OF.sub(lambda match: ", ".join(f"`{name}`" for name in names(match[1])) or "none", meaning)


def _shown(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _default(schema: type, key: str) -> Any:
    first, *rest = key.split(".")
    field: Any = next(field for field in dataclasses.fields(schema) if field.name == first)
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    # From the default of the whole group: a schema may create a group with other defaults than those of its class.
    return functools.reduce(getattr, rest, value)


@functools.cache
def _meanings(schema: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass and its bases. Python drops them, so the source is parsed."""
    bases = [base for base in schema.__bases__ if dataclasses.is_dataclass(base)]
    meanings = {name: text for base in reversed(bases) for name, text in _meanings(base).items()}
    definition = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]
    assert isinstance(definition, ast.ClassDef)
    for pair in itertools.pairwise(definition.body):
        match pair:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                meanings[name] = " ".join(text.split())
    return meanings

"""Names that a test takes from a program, and those that it does not: a function that checks what the program computes
has to be the library's, whatever the program has put in its place.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

from plugins.sandbox.code_link import Link, library
from plugins.sandbox.code_values import Foreign, ProgramError

MODULE_ALIASES = {
    "np": "numpy",
    "pd": "pandas",
    "nx": "networkx",
    "sp": "scipy",
    "dt": "datetime",
    "plt": "matplotlib.pyplot",
    **{name: name for name in sys.stdlib_module_names},
    **{name: name for name in ("networkx", "numpy", "pandas", "pytest", "scipy", "sortedcontainers", "sympy")},
}
_CHECKS = {
    "math": "isclose",
    "cmath": "isclose",
    "collections": "Counter OrderedDict defaultdict deque namedtuple ChainMap",
    "copy": "deepcopy",
    "datetime": "datetime date timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "operator": "eq ne itemgetter attrgetter methodcaller",
    "numpy": "allclose isclose array_equal array_equiv array asarray ndarray",
    "numpy.testing": "assert_allclose assert_almost_equal assert_array_almost_equal assert_array_equal assert_equal",
    "pytest": "approx raises",
    "unittest": "TestCase",
}
"""Names by module that tests compare and prepare values with. Only rarely a program is asked for one of these."""
_FUNCTIONS = {
    "functools": "reduce cmp_to_key partial",
    "heapq": "heapify heappop heappush nlargest nsmallest",
    "itertools": "permutations combinations chain zip_longest islice accumulate groupby starmap takewhile dropwhile",
    "json": "dumps loads",
    "math": " ".join(name for name in dir(math) if not name.startswith("_")),
    "random": "seed randint shuffle sample randrange",
    "statistics": "mean fmean median mode stdev pstdev variance pvariance",
}
"""Names that tests use, too, and that programs are asked for."""
LIBRARY_NAMES: dict[str, list[str]] = {}
"""Modules that have what tests know by a name."""
for _module, _names in (*_CHECKS.items(), *_FUNCTIONS.items()):
    for _name in _names.split():
        LIBRARY_NAMES.setdefault(_name, []).append(_module)
CHECKS = {name for names in _CHECKS.values() for name in names.split()}


class Names(dict[str, Any]):
    """The global names of a test: its own, builtins, those of libraries, and the program's, read when they are used."""

    def __init__(self, link: Link, test: ast.Module) -> None:
        super().__init__(__name__="__test__", __builtins__=builtins)
        self._link = link
        theirs = frozenset(link.ask("names"))
        used = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} & theirs - set(vars(builtins))
        self._sources = {name: self._source(name) for name in used}
        refuse_checks_of_the_program(test, {name for name, source in self._sources.items() if not source})
        self._theirs = theirs

    def _source(self, name: str) -> str:
        source = self._link.ask("source", name, LIBRARY_NAMES.get(name, []))
        if name in MODULE_ALIASES:
            # Of a function that is called like a module the attributes are the module's.
            return source and MODULE_ALIASES[name]
        return str(source)

    def __contains__(self, name: object) -> bool:
        return name in self._theirs or super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name not in self._theirs or hasattr(builtins, name):
            raise KeyError(name)
        source = self._sources.get(name, "")
        if source and name in LIBRARY_NAMES and source in LIBRARY_NAMES[name]:
            return getattr(library(source), name)
        if source:
            return library(source)
        value = self._link.ask("name", name)
        if isinstance(value, Foreign) and name in MODULE_ALIASES:
            # A function of this name can be called. What is taken from the module comes from the library.
            return type(value)(self._link, value._troupe_number, importable(MODULE_ALIASES[name]))
        return value


def importable(name: str) -> types.ModuleType:
    """A module, or an empty one where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return types.ModuleType(name)


def refuse_checks_of_the_program(test: ast.Module, own: set[str]) -> None:
    """Refuse a test in which a function of the program's own, with a library's name, decides about another one.

    In `assert isclose(area(2), 12.57)` nothing is checked where `isclose` is the program's own, and in
    `assert double(4) == sqrt(64)` nothing where `sqrt` is. In `assert gcd(4, 6) == 2` it is what is to be tested.

    Args:
        test: it.
        own: names in it that the program has defined itself.

    Raises:
        ProgramError: the program has such a function.
    """
    for name in own:
        others = own - {name}
        if not others:
            return
        used_as = {name, *_attributes_of(test, name)} & LIBRARY_NAMES.keys()
        if used_as & CHECKS or (used_as and _meet(test, name, others)):
            raise ProgramError(f"{name} is the program's own, and used like {min(used_as)} of a library")


def _attributes_of(test: ast.Module, name: str) -> set[str]:
    """What a test takes from the thing with this name, and from what it takes from that."""
    found: set[str] = set()
    for node in ast.walk(test):
        attributes = set()
        root = node
        while isinstance(root, ast.Attribute):
            attributes.add(root.attr)
            root = root.value
        if isinstance(root, ast.Name) and root.id == name:
            found |= attributes
    return found


def _meet(test: ast.Module, name: str, others: set[str]) -> bool:
    """True if a test uses what one name and what the others have computed in the same assertion or statement."""
    parameters = {node.arg for node in ast.walk(test) if isinstance(node, ast.arg)}
    parts = list(_parts(test))
    one, other = _computed(parts, {name}), _computed(parts, others | parameters)
    return any(one & names and other & names for names in map(_names_in, parts))


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a test, and parts of assertions that hold by themselves."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for value in node.values:
            yield from _parts(value)
    elif isinstance(node, ast.Assert):
        yield from _parts(node.test)
    elif hasattr(node, "body") and isinstance(node, ast.stmt | ast.mod | ast.ExceptHandler | ast.match_case):
        for child in ast.iter_child_nodes(node):
            yield from _parts(child)
        if isinstance(node, ast.For):
            yield ast.Tuple([node.target, node.iter], ast.Load())
    else:
        yield node


def _computed(parts: list[ast.AST], sources: set[str]) -> set[str]:
    """Names that may hold what these have computed, and these."""
    computed = set(sources)
    while True:
        new = {name for part in parts if computed & _names_in(part) for name in _bound_by(part)}
        if new <= computed:
            return computed
        computed |= new


def _names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _bound_by(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}

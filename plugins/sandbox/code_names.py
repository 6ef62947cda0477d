"""Names that a test reads from a program, and names that it does not.

A function that checks the program's results must come from the library, even if the program has replaced it.
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
"""Module -> names with which tests compare and prepare values. Tasks rarely ask a program for one of these."""
_FUNCTIONS = {
    "functools": "reduce cmp_to_key partial",
    "heapq": "heapify heappop heappush nlargest nsmallest",
    "itertools": "permutations combinations chain zip_longest islice accumulate groupby starmap takewhile dropwhile",
    "json": "dumps loads",
    "math": " ".join(name for name in dir(math) if not name.startswith("_")),
    "random": "seed randint shuffle sample randrange",
    "statistics": "mean fmean median mode stdev pstdev variance pvariance",
}
"""Module -> names that tests use and that tasks also ask programs for."""
LIBRARY_NAMES: dict[str, list[str]] = {}
"""Name -> modules that have it."""
for _module, _names in (*_CHECKS.items(), *_FUNCTIONS.items()):
    for _name in _names.split():
        LIBRARY_NAMES.setdefault(_name, []).append(_module)
CHECKS = {name for names in _CHECKS.values() for name in names.split()}


class Names(dict[str, Any]):
    """Global names of a test: its own, builtins, those of libraries, and those of the program, which are read on
    use.
    """

    def __init__(self, link: Link, test: ast.Module) -> None:
        super().__init__(__name__="__test__", __builtins__=builtins)
        self._link = link
        # Read once: a program could otherwise change its names between two uses.
        theirs = frozenset(link.ask("names"))
        used = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} & theirs - set(vars(builtins))
        self._sources = {name: self._source(name) for name in used}
        refuse_checks_of_the_program(test, {name for name, source in self._sources.items() if not source})
        self._theirs = theirs

    def _source(self, name: str) -> str:
        source = self._link.ask("source", name, LIBRARY_NAMES.get(name, []))
        if name in MODULE_ALIASES:
            # If a test calls a function with the name of a module, attributes of that name are still the module's.
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
            # A function with the name of a module can be called, but attributes come from the library.
            return type(value)(self._link, value._troupe_number, importable(MODULE_ALIASES[name]))
        return value


def importable(name: str) -> types.ModuleType:
    """Return a module, or an empty one if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return types.ModuleType(name)


def refuse_checks_of_the_program(test: ast.Module, defined: set[str]) -> None:
    """Refuse a test in which a function of the program that has a library's name checks another function.

    `assert isclose(area(2), 12.57)` checks nothing if `isclose` is defined by the program. Nor does
    `assert double(4) == sqrt(64)` if `sqrt` is. In `assert gcd(4, 6) == 2`, `gcd` is the function under test.

    Args:
        test: the parsed test.
        defined: names in the test that the program has defined itself.

    Raises:
        ProgramError: the program has such a function.
    """
    for name in defined:
        others = defined - {name}
        if not others:
            return
        used_as = {name, *_attributes_of(test, name)} & LIBRARY_NAMES.keys()
        if used_as & CHECKS or (used_as and _meet(test, name, others)):
            raise ProgramError(f"{name} is the program's own, and used like {min(used_as)} of a library")


def _attributes_of(test: ast.Module, name: str) -> set[str]:
    """Return the attributes that a test reads from the value of a name, including attributes of attributes."""
    attributes_of_name: set[str] = set()
    for node in ast.walk(test):
        attributes = set()
        root = node
        while isinstance(root, ast.Attribute):
            attributes.add(root.attr)
            root = root.value
        if isinstance(root, ast.Name) and root.id == name:
            attributes_of_name |= attributes
    return attributes_of_name


def _meet(test: ast.Module, name: str, others: set[str]) -> bool:
    """Return True if an assertion or statement of a test uses results of one name and of the others together."""
    # A lambda's parameter may receive the result of any function.
    parameters = {node.arg for node in ast.walk(test) if isinstance(node, ast.arg)}
    parts = list(_parts(test))
    results = _computed(parts, {name})
    other_results = _computed(parts, others | parameters)
    return any(results & names and other_results & names for names in map(_names_in, parts))


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a test, and the operands of `and` in assertions separately."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for value in node.values:
            yield from _parts(value)
    elif isinstance(node, ast.Assert):
        yield from _parts(node.test)
    elif hasattr(node, "body") and isinstance(node, ast.stmt | ast.mod | ast.ExceptHandler | ast.match_case):
        for child in ast.iter_child_nodes(node):
            yield from _parts(child)
        # A loop variable is bound to results of the iterated expression.
        if isinstance(node, ast.For):
            yield ast.Tuple([node.target, node.iter], ast.Load())
    else:
        yield node


def _computed(parts: list[ast.AST], sources: set[str]) -> set[str]:
    """Return the names that may hold results of these sources, including the sources."""
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

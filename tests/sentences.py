"""Counts of phrasings that CONTRIBUTING.md rules out, per file, and their densities per layer.

    python -m tests.sentences [FILE ...]     print what each file has
    python -m tests.sentences --check        print what exceeds the allow-list or a density, and fail if anything does
    python -m tests.sentences --write        lower tests/sentences.json to what the tree has now

tests/sentences.json is the allow-list: rule -> file -> maximum count. Its entry `densities` (layer -> rule -> number)
has the layers that do not reach a bar of this file yet. The list may only shrink, and a density may only approach its
bar.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.architecture import LAYERS, ROOT, code_lines, sources

ALLOWED = ROOT / "tests" / "sentences.json"
FOLDERS = (*LAYERS, "tests")
FIRST_WORDS = frozenset(["What", "Of", "Whether", "Who", "Whose", "How", "So", "Those", "These", "Where", "That"])
"""First words of a docstring that leave its subject out."""
EMPTY_NAMES = frozenset(["found", "own", "asked", "wanted", "told", "given", "there"])
"""Names of variables that do not name their content."""
NO_COMMENT = re.compile(r"#\s*(noqa|type:|pyright:|!|fmt:|pragma)")
PER_1000 = {"tuple_assignment": 5.0, "conditional_expression": 13.0}
"""Maximum number per 1,000 lines of code of a layer."""
COMMENTS_PER_100 = {"components": 5.0, "training": 5.0, "tests": 0.0}
"""Layer -> minimum number of comments per 100 lines of code."""
COMMENTS_ELSEWHERE = 4.0
"""Minimum number of comments per 100 lines of code in the other layers."""
DENSITIES = "densities"
"""Key of tests/sentences.json."""


def first_word(text: str) -> str:
    """Return the first word of a text."""
    return re.split(r"\W", text.lstrip(), maxsplit=1)[0]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring, those of attributes included."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def assigned_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every variable that is assigned, looped over or a parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def is_unrelated_tuple(node: ast.AST) -> bool:
    """True for `a, b = 1, 2`, but not for a swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
        return False
    if not isinstance(node.value, ast.Tuple):
        return False
    targets = {ast.unparse(target) for target in node.targets[0].elts}
    return targets != {ast.unparse(value) for value in node.value.elts}


def is_nested_conditional(node: ast.AST) -> bool:
    """True for `a if b else c if d else e`."""
    return isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse))


def is_multiplied_by_condition(node: ast.AST) -> bool:
    """True for `2 * (a > b)` and `[a] * bool(b)`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    for side in (node.left, node.right):
        is_bool_call = isinstance(side, ast.Call) and ast.unparse(side.func) == "bool"
        is_condition = isinstance(side, ast.BoolOp) or (isinstance(side, ast.UnaryOp) and isinstance(side.op, ast.Not))
        other = node.right if side is node.left else node.left
        is_text_or_list = isinstance(other, ast.List | ast.JoinedStr | ast.Constant)
        if is_bool_call or is_condition or (isinstance(side, ast.Compare) and is_text_or_list):
            return True
    return False


def places_in(path: Path) -> dict[str, list[tuple[int, str]]]:
    """Return rule -> lines and texts of a file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    places: dict[str, list[tuple[int, str]]] = {
        "first_word": [(line, doc[:70]) for line, doc in docstrings(tree) if first_word(doc) in FIRST_WORDS],
        "empty_name": [(line, name) for line, name in assigned_names(tree) if name in EMPTY_NAMES],
        "nested_conditional": [],
        "multiplied_by_condition": [],
        "tuple_assignment": [],
        "conditional_expression": [],
    }
    checks = {
        "nested_conditional": is_nested_conditional,
        "multiplied_by_condition": is_multiplied_by_condition,
        "tuple_assignment": is_unrelated_tuple,
        "conditional_expression": lambda node: isinstance(node, ast.IfExp),
    }
    for node in ast.walk(tree):
        for rule, check in checks.items():
            if check(node):
                places[rule].append((getattr(node, "lineno", 0), ast.unparse(node)[:70]))
    return places


def comments_in(path: Path) -> int:
    """Return the number of comments of a file, without those that only address tools."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return sum(1 for token in tokens if token.type == tokenize.COMMENT and not NO_COMMENT.match(token.string))


@functools.cache
def counts_of(root: Path) -> dict[str, dict[str, int]]:
    """Return rule -> file -> number of places, without zeros."""
    counts: dict[str, dict[str, int]] = {}
    for path in sources(root, *FOLDERS):
        for rule, places in places_in(path).items():
            if places:
                counts.setdefault(rule, {})[path.relative_to(root).as_posix()] = len(places)
    return counts


def excess(counts: dict[str, dict[str, int]], allowed: dict[str, dict[str, int]]) -> list[str]:
    """Return a line for each file that has more places of a rule than it may have."""
    faults: list[str] = []
    for rule, files in counts.items():
        for file, count in files.items():
            most = allowed.get(rule, {}).get(file, 0)
            if count > most and rule not in PER_1000:
                faults.append(f"{file}: {rule} {count} times, at most {most}; see python -m tests.sentences {file}")
    return faults


def densities(root: Path) -> dict[str, dict[str, float]]:
    """Return layer -> rule -> places per 1,000 lines of code, and comments per 100."""
    counts = counts_of(root)
    table: dict[str, dict[str, float]] = {}
    for layer in FOLDERS:
        paths = list(sources(root, layer))
        lines = sum(len(code_lines(path.read_text(encoding="utf-8"))) for path in paths)
        row = {}
        for rule in PER_1000:
            total = sum(count for file, count in counts.get(rule, {}).items() if file.startswith(f"{layer}/"))
            row[rule] = round(1000 * total / max(lines, 1), 1)
        row["comments"] = round(100 * sum(map(comments_in, paths)) / max(lines, 1), 1)
        table[layer] = row
    return table


def density_bars(layer: str, allowed: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return rule -> bar of a layer: the general one, or the number in the allow-list while that is further away."""
    known = allowed.get(layer, {})
    comments = COMMENTS_PER_100.get(layer, COMMENTS_ELSEWHERE)
    bars = {rule: max(most, known.get(rule, 0.0)) for rule, most in PER_1000.items()}
    return bars | {"comments": min(comments, known.get("comments", comments))}


def density_faults(table: dict[str, dict[str, float]], allowed: dict[str, dict[str, float]]) -> list[str]:
    """Return an error for each density of a layer that misses its bar."""
    faults: list[str] = []
    for layer, row in table.items():
        bars = density_bars(layer, allowed)
        faults += [
            f"{layer}: {row[rule]} {rule} per 1,000 lines of code, at most {bars[rule]}"
            for rule in PER_1000
            if row[rule] > bars[rule]
        ]
        if row["comments"] < bars["comments"]:
            faults.append(f"{layer}: {row['comments']} comments per 100 lines of code, at least {bars['comments']}")
    return faults


def missed_densities(table: dict[str, dict[str, float]], allowed: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return the densities that still miss their general bar. None is further from it than in `allowed`."""
    missed: dict[str, dict[str, float]] = {}
    for layer, row in table.items():
        bars = density_bars(layer, {})
        known = density_bars(layer, allowed)
        for rule, bar in bars.items():
            if rule == "comments" and max(row[rule], known[rule]) < bar:
                missed.setdefault(layer, {})[rule] = max(row[rule], known[rule])
            elif rule != "comments" and min(row[rule], known[rule]) > bar:
                missed.setdefault(layer, {})[rule] = min(row[rule], known[rule])
    return missed


def main(arguments: list[str]) -> None:
    """Print what files have, check them against the allow-list, or lower it."""
    if arguments == ["--check"]:
        allowed = json.loads(ALLOWED.read_text(encoding="utf-8"))
        faults = excess(counts_of(ROOT), allowed) + density_faults(densities(ROOT), allowed.get(DENSITIES, {}))
        print(*faults, sep="\n")
        sys.exit(bool(faults))
    if arguments == ["--write"]:
        counts = counts_of(ROOT)
        allowed: dict[str, Any] = json.loads(ALLOWED.read_text(encoding="utf-8")) if ALLOWED.exists() else dict(counts)
        missed = missed_densities(densities(ROOT), allowed.get(DENSITIES, {}))
        lowered = {
            rule: {file: min(count, allowed.get(rule, {}).get(file, 0)) for file, count in sorted(files.items())}
            for rule, files in sorted(counts.items())
            if rule not in PER_1000
        }
        kept = {rule: {file: count for file, count in files.items() if count} for rule, files in lowered.items()}
        if missed:
            kept[DENSITIES] = missed
        ALLOWED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        return
    for argument in arguments:
        path = Path(argument)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for rule, places in places_in(file).items():
                for line, text in places:
                    print(f"{file}:{line}: {rule}: {text!r}")
    if not arguments:
        for rule, files in counts_of(ROOT).items():
            print(rule, sum(files.values()), "in", len(files), "files")
        for layer, row in densities(ROOT).items():
            print(layer, row)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Python files of the user with reward functions or agents. They are parsed here and never run."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from pathlib import Path

from components.rewards.base import FILE

FUNCTION_NAME = "reward_func"
"""Default name of the function in a reward file."""
FUNCTION_NAMES = (FUNCTION_NAME, "compute_score")
"""Names of the function in a reward file that need not be given after the path, as in `style.py:brevity`."""
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
"""Syntax nodes that define a function."""


def reward_function(part: str) -> tuple[Path, str]:
    """Return the file of a part and the name of its function, without running the file.

    The function is the one that the part names. Without a name it is one of FUNCTION_NAMES, or else the only public
    function of the file.

    Raises:
        ValueError: the file does not exist, is not valid Python, or does not define the function.
    """
    match = FILE.fullmatch(part)
    assert match is not None, part
    path = match["path"]
    name = match["name"]
    usage = "reward_func(queries, prompts, labels, **kwargs), or give the name of a function: FILE.py:NAME"
    if name is not None:
        check_defines(path, "reward file", [name], f"{name}, which {part!r} names")
        return Path(path).expanduser().resolve(), name
    # Parsed and not imported: the user's file may load a model, and runs only in child processes.
    tree = parse_file(path, "reward file")
    public = [node.name for node in tree.body if isinstance(node, FUNCTION_NODES) and node.name[0] != "_"]
    candidates: Sequence[str] = FUNCTION_NAMES
    if len(public) == 1 and names_in(tree).isdisjoint(FUNCTION_NAMES):
        candidates = public
    defined = names_in(check_defines(path, "reward file", candidates, usage))
    return Path(path).expanduser().resolve(), next(name for name in candidates if name in defined)


def parse_file(spec: str, kind: str) -> ast.Module:
    """Parse a user's file without running it. `kind` names the file in error messages, such as "reward file".

    Raises:
        ValueError: the file does not exist, or is not valid Python.
    """
    path = Path(spec).expanduser()
    if not path.is_file():
        raise ValueError(f"{kind} {spec!r} does not exist (looked in {Path.cwd()}); give the path of a .py file")
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{kind} {spec!r} is not valid Python: {error}") from error


def check_defines(spec: str, kind: str, names: Collection[str], usage: str) -> ast.Module:
    """Parse a user's file, and check that it defines one of these names.

    Args:
        spec: path of the file.
        kind: name of the file in error messages, such as "reward file".
        names: names of which one must be defined.
        usage: the expected definition, for error messages.

    Raises:
        ValueError: the file does not exist, is not valid Python, or defines none of the names.
    """
    tree = parse_file(spec, kind)
    defined = names_in(tree)
    if defined.isdisjoint(names):
        raise ValueError(f"{kind} {spec!r} does not define {usage}; found: {', '.join(sorted(defined)) or 'nothing'}")
    return tree


def names_in(tree: ast.Module) -> set[str]:
    """Return the names that a file defines at its top level by def, class, assignment or import."""
    defined = set[str]()
    # Only the top level: a name inside of a function or class cannot be imported.
    for node in tree.body:
        if isinstance(node, (*FUNCTION_NODES, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
        # A reward file may only re-export a function of a package.
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined.update(alias.asname or alias.name for alias in node.names)
    return defined

"""Build of the wheel, in which all packages of this repository have one import name: `troupe`.

A clone is used with its root on `sys.path`: `import core`, `from training.run.run import Run`. In site-packages these
names would collide with other projects (`agents` is the import name of openai-agents). The wheel therefore contains
`troupe/core`, `troupe/training` and so on, and every file is rewritten while it is copied. The result is plain code: no
import hook runs at import time. Three things are rewritten, for every top-level package of pyproject.toml:

- import statements: `from core import Job` becomes `from troupe.core import Job`;
- dotted names of existing modules in strings and comments: "training.roles.rollout:RolloutWorker";
- strings that are a package and a dot: "core.".

Relative imports, file names with slashes, and attributes of variables stay as they are. Everything else about the build
is setuptools' own. An editable install keeps the names of the clone.
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import tokenize
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
NAME = "troupe"
Edit = tuple[int, int, str]
"""Byte offsets of a stretch of a source, and its replacement."""


def top_level_packages(root: Path = ROOT) -> list[str]:
    """Return the top-level packages of pyproject.toml whose folders exist."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    patterns: list[str] = project["tool"]["setuptools"]["packages"]["find"]["include"]
    return [name for name in (pattern.rstrip("*") for pattern in patterns) if (root / name).is_dir()]


def files_of(root: Path, packages: Collection[str]) -> list[Path]:
    """Return all files of the packages relative to `root`, without caches and hidden files."""
    files = (path.relative_to(root) for package in packages for path in (root / package).rglob("*") if path.is_file())
    return sorted(
        path
        for path in files
        if path.suffix not in {".pyc", ".pyo"} and not any(p.startswith((".", "__pycache__")) for p in path.parts)
    )


def modules_of(files: Collection[Path]) -> set[str]:
    """Return the dotted names of all modules and packages (folders with Python files) among the files."""
    modules: set[str] = set()
    for path in (path.with_suffix("") for path in files if path.suffix == ".py"):
        parts = path.parts[:-1] if path.name == "__init__" else path.parts
        modules.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return modules


class Rewriter:
    """Prefix `troupe.` to the names of our packages in Python sources."""

    def __init__(self, modules: Collection[str]) -> None:
        self._modules = frozenset(modules)
        self._tops = frozenset(name.partition(".")[0] for name in modules)
        tops = "|".join(sorted(self._tops))
        self._dotted = re.compile(rf"(?<![\w./-])(?:{tops})\.\w+")
        self._import = re.compile(rf"\bfrom (?=(?:{tops}) import\b)")
        self._prefix = re.compile(rf"(?P<quote>['\"])(?:{tops})\.(?P=quote)")

    def rewritten(self, source: bytes, path: str) -> bytes:
        """Return the source with all names replaced.

        Raises:
            ValueError: if more than imports and strings would change.
        """
        tree = ast.parse(source, filename=path)
        lines = source.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        edits = [*self._edits_of_nodes(tree, source, starts), *self._edits_of_comments(source, starts)]
        result = source
        for start, end, text in sorted(edits, reverse=True):
            result = result[:start] + text.encode() + result[end:]
        if _skeleton(tree) != _skeleton(ast.parse(result, filename=path)):
            raise ValueError(f"{path}: renaming its imports would change other code; see Rewriter in setup.py")
        return result

    def _edits_of_nodes(self, tree: ast.AST, source: bytes, starts: list[int]) -> Iterator[Edit]:
        for node in _outermost(tree):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            text = source[start:end].decode()
            if isinstance(node, ast.Import):
                yield start, end, self._import_statement(node) or text
            elif isinstance(node, ast.ImportFrom):
                if not node.level and self._is_ours(node.module or ""):
                    yield start, end, re.sub(r"^from\s+", f"from {NAME}.", text)
            elif isinstance(node, ast.JoinedStr):
                yield (
                    start,
                    end,
                    "".join(
                        part if is_expression else self._renamed(part)
                        for is_expression, part in _parts_of_fstring(text)
                    ),
                )
            else:
                yield start, end, self._renamed(text)

    def _edits_of_comments(self, source: bytes, starts: list[int]) -> Iterator[Edit]:
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            if token.type == tokenize.COMMENT:
                start = starts[token.start[0] - 1] + len(token.line[: token.start[1]].encode())
                yield start, start + len(token.string.encode()), self._renamed(token.string)

    def _is_ours(self, module: str) -> bool:
        return module.partition(".")[0] in self._tops

    def _import_statement(self, node: ast.Import) -> str:
        """Return the statement with our names replaced, or an empty string if it has none."""
        if not any(self._is_ours(alias.name) for alias in node.names):
            return ""
        statements: list[str] = []
        for name, asname in ((alias.name, alias.asname) for alias in node.names):
            prefix = f"{NAME}." if self._is_ours(name) else ""
            if not prefix or asname:
                statements.append(f"import {prefix}{name}" + (f" as {asname}" if asname else ""))
                continue
            if "." in name:
                statements.append(f"import {prefix}{name}")
            # `import core.job` binds the name core, which the code below uses.
            statements.append(f"from {NAME} import {name.partition('.')[0]}")
        return "; ".join(statements)

    def _renamed(self, text: str) -> str:
        def prefixed(match: re.Match[str]) -> str:
            return f"{NAME}.{match[0]}" if match[0] in self._modules else match[0]

        if self._prefix.fullmatch(text):
            return f"{text[0]}{NAME}.{text[1:]}"
        return self._import.sub(f"from {NAME}.", self._dotted.sub(prefixed, text))


def _outermost(tree: ast.AST) -> Iterator[Any]:
    """Yield all imports and strings, without the parts of f-strings."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            yield node
        else:
            waiting.extend(ast.iter_child_nodes(node))


def _parts_of_fstring(text: str) -> Iterator[tuple[bool, str]]:
    """Split the source of an f-string into text and replacement fields; True marks a field."""
    depth = 0
    for part in re.split(r"(\{\{|\}\}|\{|\})", text):
        if part == "{" or (depth and part == "{{"):
            depth += len(part)
        yield depth > 0, part
        if depth and part in {"}", "}}"}:
            depth = max(0, depth - len(part))


def _skeleton(tree: ast.AST) -> str:
    """Return a dump of the code without its imports and without the content of strings; `tree` is changed."""
    for node in ast.walk(tree):
        for name, value in list(ast.iter_fields(node)):
            if isinstance(value, list):
                setattr(node, name, [item for item in value if not isinstance(item, ast.Import | ast.ImportFrom)])
            elif isinstance(node, ast.Constant) and isinstance(value, str):
                setattr(node, name, "")
    return ast.dump(tree)


class BuildUnderOneName(build_py):
    """Copy the packages to `troupe/` in the build folder and rewrite their names."""

    def run(self) -> None:
        """Build all files, or do what setuptools does for an editable install."""
        if self.editable_mode:
            super().run()
            return
        packages = top_level_packages()
        files = files_of(ROOT, packages)
        rewriter = Rewriter(modules_of(files))
        target = Path(self.build_lib) / NAME
        # Files of an earlier build that have moved since would otherwise be in the wheel.
        shutil.rmtree(target, ignore_errors=True)
        for path in files:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target / path)
            if path.suffix == ".py":
                (target / path).write_bytes(rewriter.rewritten((ROOT / path).read_bytes(), str(path)))
        about, version = self.distribution.get_description(), self.distribution.get_version()
        (target / "__init__.py").write_text(f'"""{about}."""\n\n__version__ = "{version}"\n', encoding="utf-8")
        (target / "py.typed").touch()
        self._built = [str(target / path) for path in (*files, "__init__.py", "py.typed")]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files that `run` has written."""
        return super().get_outputs(include_bytecode) if self.editable_mode else self._built


class NameOfWheel(egg_info):
    """Metadata whose top_level.txt names what the wheel installs."""

    def run(self) -> None:
        """Write the metadata."""
        super().run()
        if self.distribution.get_command_obj("editable_wheel", create=False) is None:
            (Path(self.egg_info) / "top_level.txt").write_text(f"{NAME}\n", encoding="utf-8")


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildUnderOneName, "egg_info": NameOfWheel})

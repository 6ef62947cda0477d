"""Checks of the layers of the project, their sizes and their files.

Each check is a function from a tree to the list of its faults, so that tests/test_architecture.py can show that
it finds them in a tree that has them.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import itertools
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    "core": {"core"},
    "components": {"components"},
    "agents": {"agents", "components"},
    "training": {"core", "agents", "components", "training"},
    "plugins": {"core", "agents", "components", "training"},
    "recipes": {"core", "agents", "components", "training"},
    "scripts": {"core", "agents", "components", "training", "plugins", "recipes"},
    "tests": {"core", "agents", "components", "training", "plugins", "recipes", "tests"},
}
"""Folder -> folders that its files may import. A recipe reaches its own files by relative imports, and a
plug-in its own files. The registry (components/registry.py) loads plug-ins by the values of options."""
AGENTS_IN_TRAINING = "agents.options"
"""The only module of `agents` that training imports: its options are a group of every command. The registry loads the
others."""
LAYERS = ("core", "components", "agents", "training", "plugins", "recipes", "scripts")
CORE_MAY_IMPORT = {"ray", "omegaconf", "pydantic"}
ENGINE_LIBRARIES = {"deepspeed", "peft", "vllm"}
"""Libraries that only plug-ins may import."""
TORCH_FREE_FILES = {"main.py", "config.py", "remote_call.py"}
"""Files of a recipe that must work without torch: they plan a job or name its calls."""

CEILINGS = tomllib.loads((ROOT / "tests" / "ceilings.toml").read_text(encoding="utf-8"))
FUNCTION_LINES: int = CEILINGS["all"]["function"]
FILE_LINES: int = CEILINGS["all"]["file"]
LAYER_LINES: dict[str, int] = CEILINGS["layers"]
RECIPE_LINES: dict[str, int] = CEILINGS["recipes"]
"""Maximum lines of code by recipe; its keys are the recipes of this project, any other is a user's copy."""
CLOSURE_LINES: dict[str, int] = CEILINGS["closures"]
"""Maximum lines of code of a recipe, or of one of its files, and everything it imports outside of plug-ins, also
lazily."""
PLUGIN_LINES: dict[str, int] = CEILINGS["plugins"]
"""Maximum lines of code of a plug-in; `each` holds for those that are not named."""
APART = {"single_file.py"}
"""Files of a recipe that are for reading, and not part of it."""
SHARED_SHARE = 0.4
"""Maximum share of lines that two recipes of this project have in common (imports, the shape of the loop)."""

RECIPE_FILES = ("README.md", "config.py", "main.py", "trainer.py", "remote_call.py", "algorithm.py", "run.sh")
IMPORT_CORE_S = 0.5
THIN = {")", "(", "]", "}", "},", "),", "],", "):", "]:", "else:", "return", "pass"}
"""Lines that are ignored in comparisons of recipes."""


@dataclass(frozen=True)
class Import:
    """An imported name, resolved to its absolute form."""

    name: str
    line: int
    relative: bool
    for_types_only: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def sources(root: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(p for p in (root / folder).rglob("*.py") if "__pycache__" not in p.parts)


@functools.lru_cache(maxsize=1000)
def syntax(text: str) -> ast.Module:
    """Return the cached syntax tree of a file."""
    return ast.parse(text)


def where(path: Path, root: Path, line: int) -> str:
    return f"{path.relative_to(root)}:{line}"


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def called(function: ast.expr) -> str:
    """Return the last part of the name of a called function."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def names_in(node: ast.stmt | ast.expr, package: tuple[str, ...]) -> list[tuple[str, bool]]:
    """Return (absolute name, is relative) of the imports of a node."""
    if isinstance(node, ast.Import):
        return [(alias.name, False) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base: list[str] = []
        if node.level:
            # Above the root there is nothing of ours; "" makes the name one that no rule allows.
            depth = len(package) - (node.level - 1)
            base = list(package[:depth]) if depth > 0 else [""]
        prefix = base + ([node.module] if node.module else [])
        return [(".".join([*prefix, alias.name]), node.level > 0) for alias in node.names]
    if isinstance(node, ast.Call) and called(node.func) in {"import_module", "__import__"}:
        target = node.args[0] if node.args else None
        if isinstance(target, ast.Constant) and isinstance(target.value, str) and target.value[:1] != ".":
            return [(target.value, False)]
    return []


def imports_of(path: Path, root: Path) -> list[Import]:
    """Return all imports of a file, including those inside of functions."""
    package = path.relative_to(root).parent.parts
    imports: list[Import] = []

    def visit(node: ast.AST, for_types_only: bool) -> None:
        if isinstance(node, ast.stmt | ast.expr):
            imports.extend(Import(n, node.lineno, rel, for_types_only) for n, rel in names_in(node, package))
        guarded = node.body if isinstance(node, ast.If) and is_type_checking(node.test) else []
        for child in ast.iter_child_nodes(node):
            visit(child, for_types_only or child in guarded)

    visit(syntax(path.read_text()), False)
    return imports


def import_fault(imported: Import, parts: tuple[str, ...]) -> str:
    """Return why a file at `parts` may not import a name, or "" if it may."""
    layer = parts[0]
    if imported.top == "plugins" and layer not in {"scripts", "tests"}:
        is_own = list(parts[:2]) == imported.name.split(".")[:2]
        return "" if is_own else f"nothing imports a plug-in, but here: {imported.name}"
    if imported.top == "agents" and layer == "training" and not imported.name.startswith(AGENTS_IN_TRAINING):
        return f"training loads {imported.name} by components/registry.py"
    if imported.top in MAY_IMPORT:
        if imported.relative and imported.top == layer and layer != "recipes":
            return ""
        if layer == "recipes" and imported.top == "recipes":
            is_own = imported.relative and imported.name.split(".")[1:2] == [*parts[1:2]]
            return "" if is_own else f"a recipe imports only itself, and that relatively, but here: {imported.name}"
        return "" if imported.top in MAY_IMPORT[layer] else f"{layer} may not import {imported.name}"
    if imported.top == "":
        return "a relative import that leaves the tree"
    if layer == "core" and imported.top not in CORE_MAY_IMPORT | sys.stdlib_module_names:
        return f"core may not import {imported.name}, only {', '.join(sorted(CORE_MAY_IMPORT))} and Python's own"
    if layer == "components" and imported.top == "ray":
        return "components work without ray"
    if layer in {"components", "agents", "training"} and imported.top in ENGINE_LIBRARIES:
        return f"only a plug-in may import {imported.top}"
    return ""


def import_faults(root: Path) -> list[str]:
    """Return imports that break the order of the layers."""
    return [
        f"{where(path, root, imported.line)}: {fault}"
        for path in sources(root, *LAYERS, "tests")
        for imported in imports_of(path, root)
        if (fault := import_fault(imported, path.relative_to(root).parts))
    ]


def cycle_faults(root: Path) -> list[str]:
    """Return the first import cycle, including imports in functions and for types."""
    modules = module_files(root)
    needed = {name: needed_by(path, root, modules) - {name} for name, path in modules.items()}
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def torch_faults(root: Path) -> list[str]:
    """Return imports of torch in the files of a recipe that must work without it."""
    return [
        f"{where(path, root, imported.line)}: {path.name} of a recipe works without torch"
        for path in sources(root, "recipes")
        if path.name in TORCH_FREE_FILES and path.parent.parent == root / "recipes"
        for imported in imports_of(path, root)
        if imported.top == "torch" and not imported.for_types_only
    ]


@functools.lru_cache(maxsize=1000)
def code_lines(text: str) -> frozenset[int]:
    """Return the numbers of the code lines: without blanks, comments, and docstrings (also of fields)."""
    beside = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in beside:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(syntax(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines)


def functions_of(text: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(syntax(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def function_size_faults(root: Path) -> list[str]:
    """Return functions that exceed the ceiling."""
    faults = []
    for path in sources(root, *LAYERS, "tests"):
        lines = code_lines(path.read_text())
        for function in functions_of(path.read_text()):
            count = len(lines & set(range(function.lineno, (function.end_lineno or 0) + 1)))
            if count > FUNCTION_LINES:
                place = where(path, root, function.lineno)
                faults.append(f"{place}: {function.name} has {count} lines of code, over {FUNCTION_LINES}")
    return faults


def file_size_faults(root: Path) -> list[str]:
    """Return files that exceed the ceiling. Schemas in a config.py are exempt."""
    faults = []
    for path in sources(root, *LAYERS, "tests"):
        count = len(code_lines(path.read_text()))
        if count > FILE_LINES and path.name != "config.py":
            faults.append(f"{path.relative_to(root)} has {count} lines of code, over {FILE_LINES}")
    return faults


def recipes_of(root: Path) -> list[Path]:
    """Return the folders of the recipes of this project, without copies by users."""
    folders = (p for p in (root / "recipes").glob("*") if p.is_dir() and p.name in RECIPE_LINES)
    return sorted(p for p in folders if any(child.is_file() for child in p.iterdir()))


def size_of(root: Path, folder: str) -> int:
    """Return the number of code lines of a folder."""
    return sum(len(code_lines(p.read_text())) for p in sources(root, folder) if p.name not in APART)


def layer_size_faults(root: Path) -> list[str]:
    """Return layers and recipes that exceed their ceilings."""
    limits = {layer: limit for layer, limit in LAYER_LINES.items() if (root / layer).is_dir()}
    for recipe in recipes_of(root):
        limits[f"recipes/{recipe.name}"] = RECIPE_LINES[recipe.name]
    counts = {folder: size_of(root, folder) for folder in limits}
    return [f"{f} has {counts[f]} lines of code, over {limits[f]}" for f in limits if counts[f] > limits[f]]


def module_files(root: Path) -> dict[str, Path]:
    """Return module name -> file for the files of the project."""
    files = {".".join(path.relative_to(root).with_suffix("").parts): path for path in sources(root, *LAYERS)}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def needed_by(path: Path, root: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of the project that a file imports, including those in functions and for types."""
    names = {imported.name for imported in imports_of(path, root)}
    # `from a.b import c` names the module a.b.c, or something that is in a.b.
    return {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()


def closure_of(target: str, root: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of a recipe, or of one of its files, and all modules that they import outside of plug-ins.

    Args:
        target: a folder, without the files that are apart, or a file, such as `recipes/grpo/single_file.py`.
        root: of the tree.
        modules: our files by the names under which they are imported.
    """
    start = target.removesuffix(".py").replace("/", ".")
    if target.endswith(".py"):
        waiting = [start]
    else:
        waiting = [name for name in modules if name == start or name.startswith(f"{start}.")]
        waiting = [name for name in waiting if modules[name].name not in APART]
    closure = set[str]()
    while waiting:
        name = waiting.pop()
        if name not in modules or name in closure or name.startswith("plugins."):
            continue
        closure.add(name)
        waiting += needed_by(modules[name], root, modules)
        # Roles are named by strings, such as "training.roles.rollout:RolloutWorker".
        waiting += re.findall(r"\"([\w.]+):\w+\"", modules[name].read_text())
    return closure


def closure_faults(root: Path) -> list[str]:
    """Return recipes and files whose import closure exceeds its ceiling."""
    modules = module_files(root)
    faults = []
    for target, limit in CLOSURE_LINES.items():
        if not (root / target).exists():
            continue
        count = sum(len(code_lines(modules[name].read_text())) for name in closure_of(target, root, modules))
        if count > limit:
            faults.append(f"{target} and what it imports have {count} lines of code, over {limit}")
    return faults


def shared_line_faults(root: Path) -> list[str]:
    """Return pairs of recipes that share too many lines."""
    lines = {
        recipe.name: Counter(
            text
            for path in recipe.rglob("*.py")
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if number in code_lines(path.read_text()) and (text := line.strip()) not in THIN
        )
        for recipe in recipes_of(root)
    }
    faults = []
    for (one, lines_of_one), (other, lines_of_other) in itertools.combinations(lines.items(), 2):
        share = (lines_of_one & lines_of_other).total() / max((lines_of_one | lines_of_other).total(), 1)
        if share > SHARED_SHARE:
            faults.append(f"of recipes/{one} and recipes/{other} {share:.0%} is the same, over {SHARED_SHARE:.0%}")
    return faults


def plugin_size_faults(root: Path) -> list[str]:
    """Return plug-ins that exceed their ceilings."""
    counts = {
        path.parent.name: size_of(root, f"plugins/{path.parent.name}") for path in root.glob("plugins/*/__init__.py")
    }
    limits = {name: PLUGIN_LINES.get(name, PLUGIN_LINES["each"]) for name in counts}
    return [
        f"plugins/{name} has {count} lines of code, over {limits[name]}"
        for name, count in sorted(counts.items())
        if count > limits[name]
    ]


def readme_faults(root: Path) -> list[str]:
    """Return folders without a README, and Python files that a README names and that do not exist."""
    folders = {path.parent for path in sources(root, "core", "components", "agents", "training", "plugins")}
    folders -= {root / "agents" / "environments"}
    missing = sorted(folder for folder in folders if not (folder / "README.md").is_file())
    faults = [f"{folder.relative_to(root)} has no README.md" for folder in missing]
    for folder in sorted(folders - set(missing)):
        names = re.findall(r"`([\w./]+\.py)`", (folder / "README.md").read_text(encoding="utf-8"))
        unknown = [name for name in names if not (folder / name).is_file() and not (root / name).is_file()]
        faults += [f"{folder.relative_to(root)}/README.md names {name}, which does not exist" for name in unknown]
    return faults


def annotation_faults(root: Path) -> list[str]:
    """Return arguments and results without a type annotation."""
    faults = []
    for path in sources(root, *LAYERS, "tests"):
        for function in functions_of(path.read_text()):
            spec = function.args
            arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
            bare = [a.arg for a in arguments if a and a.annotation is None and a.arg not in {"self", "cls"}]
            if function.returns is None:
                bare.append("the result")
            if bare:
                place = where(path, root, function.lineno)
                faults.append(f"{place}: {function.name} gives no type for {', '.join(bare)}")
    return faults


def recipe_faults(root: Path) -> list[str]:
    """Return the files and tests that recipes lack."""
    faults = []
    for recipe in recipes_of(root):
        faults += [f"recipes/{recipe.name} has no {name}" for name in RECIPE_FILES if not (recipe / name).is_file()]
        if not any(p.name != "__init__.py" for p in (recipe / "roles").glob("*.py")):
            faults.append(f"recipes/{recipe.name} has no role in roles/")
        tests = root / "tests" / "recipes"
        if not any([*tests.glob(f"test_{recipe.name}*.py"), *(tests / recipe.name).glob("**/test_*.py")]):
            faults.append(f"recipes/{recipe.name} has no tests; write tests/recipes/test_{recipe.name}.py")
    return faults


def run_python(code: str, *arguments: str, root: Path = ROOT) -> str:
    """Return the output of a new Python process with only the tree on its path."""
    command = [sys.executable, "-P", "-c", code, *arguments]
    env = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def heavy_import_faults(root: Path, modules: list[str], forbidden: list[str]) -> list[str]:
    """Return modules whose import loads a forbidden library, directly or indirectly."""
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1].split():\n"
        "    importlib.import_module(module)\n"
        "    for name in sys.argv[2].split():\n"
        "        if name in sys.modules:\n"
        "            print(f'import {module} brings {name}')\n"
        "            sys.exit()\n"
    )
    return run_python(code, " ".join(modules), " ".join(forbidden), root=root).splitlines()


def missing_library_faults(root: Path) -> list[str]:
    """Return modules of components that cannot be imported without ray, vllm and deepspeed."""
    modules = [
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for path in sources(root, "components")
        if path.name != "__main__.py"
    ]
    code = (
        "import importlib, sys\n"
        "sys.modules.update(dict.fromkeys(['ray', 'vllm', 'deepspeed']))\n"
        "for module in sys.argv[1].split():\n"
        "    try:\n"
        "        importlib.import_module(module)\n"
        "    except ImportError as error:\n"
        "        print(f'{module}: {error}')\n"
    )
    return run_python(code, " ".join(modules), root=root).splitlines()


STATIC_CHECKS = (
    import_faults,
    cycle_faults,
    torch_faults,
    function_size_faults,
    file_size_faults,
    layer_size_faults,
    closure_faults,
    plugin_size_faults,
    readme_faults,
    shared_line_faults,
    annotation_faults,
    recipe_faults,
)

"""The layers of the project, their sizes and their files, held for the whole tree.

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
"""Which of our folders the files of a folder may import. A recipe reaches its own files by relative imports, and a
plug-in its own files. The registry (components/registry.py) loads plug-ins by the values of options."""
AGENTS_IN_TRAINING = "agents.options"
"""The only module of `agents` that training imports: its options are a group of every command. The registry loads the
others."""
LAYERS = ("core", "components", "agents", "training", "plugins", "recipes", "scripts")
CORE_MAY_IMPORT = {"ray", "omegaconf", "pydantic"}
ENGINE_LIBRARIES = {"deepspeed", "peft", "vllm"}
"""Only plug-ins import these."""
TORCH_FREE_FILES = {"main.py", "config.py", "remote_call.py"}
"""Files of a recipe that plan a job, or name its calls, before any torch is needed."""

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
"""Lines that say nothing by themselves."""


@dataclass(frozen=True)
class Import:
    """One imported name, resolved to where it stands in the tree."""

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
    """The syntax tree of a file, which several checks look at."""
    return ast.parse(text)


def where(path: Path, root: Path, line: int) -> str:
    return f"{path.relative_to(root)}:{line}"


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def called(function: ast.expr) -> str:
    """The last part of the name of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def names_in(node: ast.stmt | ast.expr, package: tuple[str, ...]) -> list[tuple[str, bool]]:
    """The absolute names that one node imports, each with whether it was written relatively."""
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
    """Every import of a file, wherever it stands in it."""
    package = path.relative_to(root).parent.parts
    found: list[Import] = []

    def visit(node: ast.AST, for_types_only: bool) -> None:
        if isinstance(node, ast.stmt | ast.expr):
            found.extend(Import(n, node.lineno, rel, for_types_only) for n, rel in names_in(node, package))
        guarded = node.body if isinstance(node, ast.If) and is_type_checking(node.test) else []
        for child in ast.iter_child_nodes(node):
            visit(child, for_types_only or child in guarded)

    visit(syntax(path.read_text()), False)
    return found


def import_fault(found: Import, parts: tuple[str, ...]) -> str:
    """Why a file at `parts` may not import this; empty when it may."""
    layer = parts[0]
    if found.top == "plugins" and layer not in {"scripts", "tests"}:
        own = list(parts[:2]) == found.name.split(".")[:2]
        return "" if own else f"nothing imports a plug-in, but here: {found.name}"
    if found.top == "agents" and layer == "training" and not found.name.startswith(AGENTS_IN_TRAINING):
        return f"training loads {found.name} by components/registry.py"
    if found.top in MAY_IMPORT:
        if found.relative and found.top == layer and layer != "recipes":
            return ""
        if layer == "recipes" and found.top == "recipes":
            own = found.relative and found.name.split(".")[1:2] == [*parts[1:2]]
            return "" if own else f"a recipe imports only itself, and that relatively, but here: {found.name}"
        return "" if found.top in MAY_IMPORT[layer] else f"{layer} may not import {found.name}"
    if found.top == "":
        return "a relative import that leaves the tree"
    if layer == "core" and found.top not in CORE_MAY_IMPORT | sys.stdlib_module_names:
        return f"core may not import {found.name}, only {', '.join(sorted(CORE_MAY_IMPORT))} and Python's own"
    if layer == "components" and found.top == "ray":
        return "components work without ray"
    if layer in {"components", "agents", "training"} and found.top in ENGINE_LIBRARIES:
        return f"only a plug-in may import {found.top}"
    return ""


def import_faults(root: Path) -> list[str]:
    """Imports that do not go down."""
    return [
        f"{where(path, root, found.line)}: {fault}"
        for path in sources(root, *LAYERS, "tests")
        for found in imports_of(path, root)
        if (fault := import_fault(found, path.relative_to(root).parts))
    ]


def cycle_faults(root: Path) -> list[str]:
    """The first circle of files that import each other, wherever in the files and for whatever the imports stand."""
    modules = module_files(root)
    needed = {name: needed_by(path, root, modules) - {name} for name, path in modules.items()}
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def torch_faults(root: Path) -> list[str]:
    """Imports of torch in the files of a recipe that run before any torch is needed."""
    return [
        f"{where(path, root, found.line)}: {path.name} of a recipe works without torch"
        for path in sources(root, "recipes")
        if path.name in TORCH_FREE_FILES and path.parent.parent == root / "recipes"
        for found in imports_of(path, root)
        if found.top == "torch" and not found.for_types_only
    ]


@functools.lru_cache(maxsize=1000)
def code_lines(text: str) -> frozenset[int]:
    """Numbers of the lines that hold code: no blanks, no comments, no docstrings (those of fields included)."""
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
    """Functions that are too long."""
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
    """Files that are too long; schemas in a config.py may be."""
    faults = []
    for path in sources(root, *LAYERS, "tests"):
        count = len(code_lines(path.read_text()))
        if count > FILE_LINES and path.name != "config.py":
            faults.append(f"{path.relative_to(root)} has {count} lines of code, over {FILE_LINES}")
    return faults


def recipes_of(root: Path) -> list[Path]:
    """Folders of the recipes of this project, without copies that users have made."""
    folders = (p for p in (root / "recipes").glob("*") if p.is_dir() and p.name in RECIPE_LINES)
    return sorted(p for p in folders if any(child.is_file() for child in p.iterdir()))


def size_of(root: Path, folder: str) -> int:
    """Number of lines of code in a folder."""
    return sum(len(code_lines(p.read_text())) for p in sources(root, folder) if p.name not in APART)


def layer_size_faults(root: Path) -> list[str]:
    """Layers and recipes that are too large."""
    limits = {layer: limit for layer, limit in LAYER_LINES.items() if (root / layer).is_dir()}
    for recipe in recipes_of(root):
        limits[f"recipes/{recipe.name}"] = RECIPE_LINES[recipe.name]
    counts = {folder: size_of(root, folder) for folder in limits}
    return [f"{f} has {counts[f]} lines of code, over {limits[f]}" for f in limits if counts[f] > limits[f]]


def module_files(root: Path) -> dict[str, Path]:
    """Our files by the names under which they are imported."""
    files = {".".join(path.relative_to(root).with_suffix("").parts): path for path in sources(root, *LAYERS)}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def needed_by(path: Path, root: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of ours that a file imports, wherever in it and for whatever."""
    names = {found.name for found in imports_of(path, root)}
    # `from a.b import c` names the module a.b.c, or something that is in a.b.
    return {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()


def closure_of(target: str, root: Path, modules: dict[str, Path]) -> set[str]:
    """Names of the modules of a recipe, or of one of its files, and of everything they import outside of plug-ins.

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
    """Recipes, and files of them, that bring too much with them."""
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
    """Recipes of this project that are copies of each other."""
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
    for (one, own), (other, others) in itertools.combinations(lines.items(), 2):
        share = (own & others).total() / max((own | others).total(), 1)
        if share > SHARED_SHARE:
            faults.append(f"of recipes/{one} and recipes/{other} {share:.0%} is the same, over {SHARED_SHARE:.0%}")
    return faults


def plugin_size_faults(root: Path) -> list[str]:
    """Plug-ins that are too large."""
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
    """Folders without a README that lists which file to open for what."""
    folders = {path.parent for path in sources(root, "core", "components", "agents", "training", "plugins")}
    folders -= {root / "agents" / "environments"}
    missing = sorted(folder for folder in folders if not (folder / "README.md").is_file())
    return [f"{folder.relative_to(root)} has no README.md" for folder in missing]


def annotation_faults(root: Path) -> list[str]:
    """Arguments and results without a type."""
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
    """Files and tests that a recipe lacks."""
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
    """What a fresh Python prints that sees the tree and nothing else of ours."""
    command = [sys.executable, "-P", "-c", code, *arguments]
    env = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def heavy_import_faults(root: Path, modules: list[str], forbidden: list[str]) -> list[str]:
    """Modules whose import brings a forbidden library with it, directly or not."""
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
    """Modules of components that cannot be imported without ray, vllm and deepspeed."""
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

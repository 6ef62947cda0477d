"""Imports a tree without one of its plug-ins, and plans runs in it.

usage (in the tree): python deleted.py < {"plans": {"<name>": ["<recipe>", "<option>", ...]}}

It prints, as JSON, the modules that cannot be imported and why, and the exit code and error of each plan.
"""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

LAYERS = ("core", "components", "agents", "training", "plugins", "recipes")
PROGRAMS = ("__main__", "_child")
"""Ends of names of modules that run when they are imported."""


def modules() -> list[str]:
    """Names of all modules of the tree, without programs, and without those that import vLLM, which takes long."""
    files = [path for layer in LAYERS for path in sorted(Path(layer).rglob("*.py"))]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    return [name for name in names if not name.endswith(PROGRAMS) and not name.startswith("plugins.vllm.")]


def import_fault(name: str) -> str:
    """Why a module cannot be imported; empty: it can, or needs a library that is not installed here."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{name}: {error}" if (error.name or "").partition(".")[0] in LAYERS else ""
    except SystemExit:
        return ""  # a program whose libraries are not installed
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return f"{name}: {type(error).__name__}: {error}"
    return ""


def plan(recipe: str, options: list[str]) -> tuple[int, str]:
    """Exit code and error of a dry run."""
    out, err = io.StringIO(), io.StringIO()
    main: Any = importlib.import_module(f"recipes.{recipe}.main").main
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["--dry_run", *options])
    return code, err.getvalue()


if __name__ == "__main__":
    plans: dict[str, list[str]] = json.load(sys.stdin)["plans"]
    # Plans come first, so that they are made with what a recipe itself imports.
    planned = {name: plan(recipe, options) for name, (recipe, *options) in plans.items()}
    faults = [fault for name in modules() if (fault := import_fault(name))]
    print(json.dumps({"plans": planned, "faults": faults}))

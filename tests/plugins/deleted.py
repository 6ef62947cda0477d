"""Import a tree without one of its plug-ins, and plan runs in it.

Usage (inside the tree): python deleted.py < {"flag": "--dry_run", "plans": {"<name>": ["<recipe>", "<option>", ...]}}

It prints as JSON the modules that cannot be imported, with the reason, and the exit code and error of each plan.
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
"""Suffixes of module names that are programs."""


def modules() -> list[str]:
    """Return the names of all modules, without programs and without modules that import vLLM, which is slow."""
    files = [path for layer in LAYERS for path in sorted(Path(layer).rglob("*.py"))]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    return [name for name in names if not name.endswith(PROGRAMS) and not name.startswith("plugins.vllm.")]


def import_fault(name: str) -> str:
    """Return why a module cannot be imported, or "" if it can or if it needs a library that is not installed."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{name}: {error}" if (error.name or "").partition(".")[0] in LAYERS else ""
    except SystemExit:
        return ""  # a program whose libraries are not installed
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return f"{name}: {type(error).__name__}: {error}"
    return ""


def plan(recipe: str, flag: str, options: list[str]) -> tuple[int, str]:
    """Return the exit code and the error of a command that plans a run, because of a flag, and ends."""
    out = io.StringIO()
    err = io.StringIO()
    main: Any = importlib.import_module(f"recipes.{recipe}.main").main
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([flag, *options])
    return code, err.getvalue()


if __name__ == "__main__":
    request = json.load(sys.stdin)
    plans: dict[str, list[str]] = request["plans"]
    # The plans run first, so that they only use what the recipe itself imports.
    planned = {name: plan(recipe, request["flag"], options) for name, (recipe, *options) in plans.items()}
    faults = [fault for name in modules() if (fault := import_fault(name))]
    print(json.dumps({"plans": planned, "faults": faults}))

"""Copies of a recipe's folder, and how they are started: as a user does."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.architecture import ROOT, recipes_of

RECIPES = [recipe.name for recipe in recipes_of(ROOT)]
"""The recipes of this project; a folder beside them is a user's copy, which may look as it likes."""


def copied(recipe: str, target: Path) -> Path:
    """A copy of the recipe's folder, as `cp -r` makes it."""
    shutil.copytree(ROOT / "recipes" / recipe, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def cloned(target: Path) -> Path:
    """A copy of the project, with all that a run of it needs."""
    for name in ("core", "components", "agents", "training", "plugins", "recipes", "scripts"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def run(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`bash run.sh options`, from another directory, with nothing in the environment that helps but what is given."""
    ours = ("PYTHONPATH", "TROUPE_HOME", "TROUPE_PYTHON")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        ["bash", str(folder / "run.sh"), *options],
        cwd=folder.parent,
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=580,
    )


def write_untrained(folder: Path, seed: int = 0) -> Path:
    """A policy with random weights that speaks the letters of the task sort."""
    from plugins.demo.tasks import get_task
    from plugins.demo.tiny_model import task_tokenizer, tiny_model

    tokenizer = task_tokenizer(get_task("sort"))
    tiny_model(tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def last_metrics(run_dir: Path) -> dict[str, Any]:
    """The last line of metrics.jsonl."""
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])

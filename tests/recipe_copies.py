"""Helpers that copy the folder of a recipe and run the copy as a user does."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.architecture import ROOT, recipes_of

RECIPES = [recipe.name for recipe in recipes_of(ROOT)]
"""Recipes of this project. Other folders are copies by users, which the checks ignore."""


def copied(recipe: str, target: Path) -> Path:
    """Copy the folder of a recipe to `target`, as `cp -r` does. Return the copy."""
    shutil.copytree(ROOT / "recipes" / recipe, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def cloned(target: Path) -> Path:
    """Copy the parts of the project that a run needs. Return the copy."""
    for name in ("core", "components", "agents", "training", "plugins", "recipes", "scripts"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def run(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `bash run.sh options` from another directory. Of the variables of the project only `env` is set."""
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
    """Write a policy with random weights and the vocabulary of the task sort. Return its folder."""
    from plugins.demo.tasks import get_task
    from plugins.demo.tiny_model import task_tokenizer, tiny_model

    tokenizer = task_tokenizer(get_task("sort"))
    tiny_model(tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def last_metrics(run_dir: Path) -> dict[str, Any]:
    """Return the metrics of the last step."""
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])

"""Runs a recipe in this process, several times in a row, so that libraries are imported once.

`python local_runs.py RECIPE` reads {"<run_dir>": ["<option>", ...], ...} as JSON, and ends with 1 when a run did not
end well.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from recipe_runs import ROOT, RunFolder


def run_locally(recipe: str, folder: Path, runs: Mapping[str, Sequence[str]]) -> dict[str, RunFolder]:
    """The folders of runs with `backend=local`, by name.

    Args:
        recipe: its name.
        folder: where the runs' folders go.
        runs: the options of each.
    """
    options = {str(folder / name): [*given, "backend=local"] for name, given in runs.items()}
    done = subprocess.run(
        [sys.executable, __file__, recipe],
        input=json.dumps(options),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: RunFolder(folder / name) for name in runs}
    for run in found.values():
        run.check_metrics()
    return found


if __name__ == "__main__":
    main = import_module(f"recipes.{sys.argv[1]}.main").main
    codes = [main([f"run_dir={folder}", *options]) for folder, options in json.load(sys.stdin).items()]
    sys.exit(int(any(codes)))

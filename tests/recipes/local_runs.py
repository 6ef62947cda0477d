"""Runs recipes in the process of the tests, which imports torch, transformers and deepspeed once for all of them.

A run with vLLM changes its process permanently, so such runs have separate processes: `python local_runs.py RECIPE`
reads {"<run_dir>": ["<option>", ...], ...} as JSON, and exits with 1 if a run fails.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from recipe_runs import ROOT, RunFolder

SET_BY_LIBRARIES = ("LD_LIBRARY_PATH", "TORCHINDUCTOR_CACHE_DIR")


class LocalRun(RunFolder):
    """A finished run with `backend=local`."""

    def __init__(self, run_dir: Path, code: int, out: str, err: str) -> None:
        super().__init__(run_dir)
        self.code, self.out, self.err = code, out, err


def run_here(recipe: str, run_dir: Path, *options: str) -> LocalRun:
    """Run a recipe once, with any outcome.

    Raises: AssertionError: it has changed a state of the process that other tests rely on.
    """
    main = import_module(f"recipes.{recipe}.main").main
    out, err = io.StringIO(), io.StringIO()
    with unchanged(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([f"run_dir={run_dir}", *options, "backend=local"])
    run = LocalRun(run_dir, code, out.getvalue(), err.getvalue())
    run.check_metrics()
    return run


def run_locally(recipe: str, folder: Path, runs: Mapping[str, Sequence[str]]) -> dict[str, LocalRun]:
    """Run a recipe several times in turn, by name. All runs must succeed.

    Args:
        recipe: its name.
        folder: where the runs' folders go.
        runs: the options of each.
    """
    folders = {name: run_here(recipe, folder / name, *options) for name, options in runs.items()}
    assert {name: run.err for name, run in folders.items() if run.code != 0} == {}
    return folders


def run_apart(recipe: str, folder: Path, runs: Mapping[str, Sequence[str]]) -> dict[str, RunFolder]:
    """Do the same in a new process, for runs that change their process permanently."""
    options = {str(folder / name): [*arguments, "backend=local"] for name, arguments in runs.items()}
    done = subprocess.run(
        [sys.executable, __file__, recipe],
        input=json.dumps(options),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folders = {name: RunFolder(folder / name) for name in runs}
    for run in folders.values():
        run.check_metrics()
    return folders


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Check that the block restores the state of the process.

    The process group of one rank that a trained model needs stays, as in every process that has trained, because
    DeepSpeed keeps references to it.
    """
    import torch  # now, because torch sets environment variables when it is imported

    before, group = state_of_process(), torch.distributed.is_initialized()
    yield
    after = state_of_process()
    assert {name: value for name, value in after.items() if value != before[name]} == {}
    if torch.distributed.is_initialized() and not group:
        assert torch.distributed.get_world_size() == 1


def state_of_process() -> dict[str, Any]:
    """Return the process-wide state that libraries and roles could change."""
    import torch

    return {
        "folder": Path.cwd(),
        # OpenCV, which transformers imports for the tokenizers of Mistral's models, prepends to LD_LIBRARY_PATH. Torch
        # sets the other one in the first checkpointed pass.
        "environment": {name: value for name, value in os.environ.items() if name not in SET_BY_LIBRARIES},
        "handlers": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "random numbers": torch.get_rng_state().tolist(),
    }


@contextlib.contextmanager
def kept_environment() -> Iterator[None]:
    """Remove the environment variables by which roles in this process find their ranks."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main = import_module(f"recipes.{sys.argv[1]}.main").main
    codes = [main([f"run_dir={folder}", *options]) for folder, options in json.load(sys.stdin).items()]
    sys.exit(int(any(codes)))

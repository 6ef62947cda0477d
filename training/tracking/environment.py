"""environment.json: what else a result depends on. Versions, the state of the code, the machine."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from training.tracking.redaction import hide_in_text
from training.tracking.serialization import json_object, write_whole

logger = logging.getLogger(__name__)

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "deepspeed",
    "vllm",
    "ray",
    "numpy",
    "pyarrow",
    "datasets",
    "wandb",
    "tensorboard",
)
CODE = Path(__file__).resolve().parents[2]
"""The folder that holds the code `components`."""
CHANGED_FILES = 50
"""As many changed files are named; `dirty` tells whether there are any."""
_PATIENCE_S = 5.0


def write_environment(run_dir: Path, code: Path = CODE) -> dict[str, Any]:
    """Write environment.json and return what this start adds to it.

    The file speaks of the newest start; those before it are kept under `earlier`, oldest first.

    Args:
        run_dir: the run's folder.
        code: the folder whose git state is noted.
    """
    environment = environment_now(code)
    path = run_dir / "environment.json"
    before = json_object(path)
    earlier = [*before.pop("earlier", []), before] if before else []
    text = json.dumps({**environment, "earlier": earlier}, indent=2)
    write_whole(path, text + "\n")
    return environment


def environment_now(code: Path = CODE) -> dict[str, Any]:
    """Look at this process and its machine."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "hostname": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "packages": {package: _version(package) for package in PACKAGES},
        "git": git_state(code),
        "hardware": _hardware(),
    }


def git_state(code: Path) -> dict[str, Any] | None:
    """Commit, branch (None off any), and what was changed since; None without git, or where git does not keep `code`.

    A folder of installed packages inside somebody's repository is not kept by it.
    """
    commit = _git(code, "rev-parse", "HEAD") if _git(code, "ls-files", "--", ".") else None
    if commit is None:
        return None
    branch = _git(code, "symbolic-ref", "--short", "-q", "HEAD")
    status = _git(code, "status", "--porcelain=v1", "-z", "--no-renames", "--", ".")
    changed = None if status is None else [entry[3:] for entry in status.split("\0") if entry]
    return {
        "commit": commit.strip(),
        "branch": branch.strip() if branch else None,
        "dirty": None if changed is None else bool(changed),
        "changed_files": None if changed is None else [hide_in_text(name) for name in changed[:CHANGED_FILES]],
    }


def _git(folder: Path, *arguments: str) -> str | None:
    # Variables of a git hook would point at another repository; a lock on the index would be a change.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return output_of("git", "-C", str(folder), *arguments, env=environment | {"GIT_OPTIONAL_LOCKS": "0"})


def output_of(program: str, *arguments: str, env: dict[str, str] | None = None) -> str | None:
    """Return the output of a program, or None if it is missing, fails or exceeds the timeout."""
    try:
        result = subprocess.run(
            [program, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=env,
            timeout=_PATIENCE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.debug("%s gave no output: %s", program, error)
        return None
    return result.stdout if result.returncode == 0 else None


def _hardware() -> dict[str, Any]:
    gpus = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": [line.strip() for line in (gpus or "").splitlines() if line.strip()],
    }


def _cpu_model() -> str:
    match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    return match[1] if match else platform.machine()  # ARM's has no model name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

"""environment.json: versions of packages, git state of the code, and hardware, on which a result also depends."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from components.process.program_output import output_of
from training.tracking.redaction import hide_in_text
from training.tracking.serialization import json_object, write_whole

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
"""Folder of the repository."""
CHANGED_FILES = 50
"""Maximum number of changed files in the list. `dirty` is also true if more files have changed."""


def write_environment(run_dir: Path, code: Path = CODE) -> dict[str, Any]:
    """Write environment.json, and return the part about this start of the run.

    The fields of the file describe the newest start. Earlier starts are in the list `earlier`, oldest first.

    Args:
        run_dir: run folder.
        code: folder whose git state is recorded.
    """
    environment = environment_now(code)
    path = run_dir / "environment.json"
    before = json_object(path)
    # Kept, because a resumed run may have other versions than the start that produced its first steps.
    earlier = before.pop("earlier", [])
    if before:
        earlier.append(before)
    text = json.dumps({**environment, "earlier": earlier}, indent=2)
    write_whole(path, text + "\n")
    return environment


def environment_now(code: Path = CODE) -> dict[str, Any]:
    """Return time, versions, git state and hardware of this process."""
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
    """Return the commit, the branch (None for a detached HEAD), and the files that differ from the commit.

    Returns None if git is missing, or if `code` is not under version control.
    """
    # A folder of installed packages may be inside a repository of the user, whose commit says nothing about this code.
    if not _git(code, "ls-files", "--", ".") or (commit := _git(code, "rev-parse", "HEAD")) is None:
        return None
    branch = _git(code, "symbolic-ref", "--short", "-q", "HEAD") or ""
    status = _git(code, "status", "--porcelain=v1", "-z", "--no-renames", "--", ".")
    state: dict[str, Any] = {"commit": commit.strip(), "branch": branch.strip() or None}
    state |= {"dirty": None, "changed_files": None}
    # None is a status that git did not report in time. An empty list would state that nothing has changed.
    if status is not None:
        changed = [entry[3:] for entry in status.split("\0") if entry]
        state |= {"dirty": bool(changed), "changed_files": [hide_in_text(name) for name in changed[:CHANGED_FILES]]}
    return state


def _git(folder: Path, *arguments: str) -> str | None:
    # In a git hook, variables such as GIT_DIR would select another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # `git status` may refresh the index. A run must not change the repository, nor wait for the lock of another git.
    return output_of("git", "-C", str(folder), *arguments, env=environment | {"GIT_OPTIONAL_LOCKS": "0"})


def _hardware() -> dict[str, Any]:
    gpus = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        # A container may allow fewer cores than the machine has. Times of a run are only comparable with this number.
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": [line.strip() for line in (gpus or "").splitlines() if line.strip()],
    }


def _cpu_model() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    return next(iter(names), platform.machine())  # /proc/cpuinfo of ARM has no model name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

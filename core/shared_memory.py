"""The folder in shared memory that a run has for itself, and the folders that killed runs left behind."""

import contextlib
import json
import os
import shutil
import socket
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def shared_folder(run_id: str) -> Path:
    """Where a run has its folder."""
    return SHARED_MEMORY / f"troupe-{run_id}"


def claim_shared(folder: Path) -> None:
    """Make the folder of a run, empty, with a note of whose it is."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": process_start(os.getpid())}
    (folder / "owner.json").write_text(json.dumps(owner), encoding="utf-8")


def sweep_shared(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the shared folders of runs on this machine whose driver was killed; returns what was removed."""
    removed = []
    for folder in root.glob("troupe-*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            owner = json.loads((folder / "owner.json").read_text(encoding="utf-8"))
            if owner["host"] == socket.gethostname() and process_start(owner["pid"]) != owner["started"]:
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def process_start(pid: int) -> str:
    """When a process began, in clock ticks since boot; empty when there is none. Tells a reused pid apart."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""

"""The folder in shared memory that a run has on each machine, and the folders that killed runs left behind."""

import contextlib
import json
import os
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BESIDE = "beside"
"""A link in a run's folder to one elsewhere that is swept with it."""


def shared_folder(run_id: str) -> Path:
    """Where a run has its folder."""
    return SHARED_MEMORY / f"troupe-{run_id}"


def claim_shared(folder: Path) -> None:
    """Make the folder of a run, for this user alone, with a note that this process uses it; every process of the run
    leaves its own.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    owners = folder / "owners"
    owners.mkdir(exist_ok=True)
    owner = {"machine": machine_id(), "pid": os.getpid(), "started": process_start(os.getpid())}
    (owners / f"{os.getpid()}.json").write_text(json.dumps(owner), encoding="utf-8")


def leave_shared(folder: Path) -> None:
    """This process uses the folder no longer; the last one of its machine removes it."""
    (folder / "owners" / f"{os.getpid()}.json").unlink(missing_ok=True)
    with contextlib.suppress(OSError, ValueError, KeyError):
        if not any(map(_may_live, _owners(folder))):
            shutil.rmtree(folder, ignore_errors=True)


def sweep_shared(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's folders on this machine whose owners are all gone; returns what was removed."""
    removed = []
    for folder in root.glob("troupe-*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if folder.lstat().st_uid != os.getuid():
                continue  # it may hold anything, such as a pipe that nobody writes to
            owners = _owners(folder)
            if owners and not any(map(_may_live, owners)):
                shutil.rmtree((folder / BESIDE).resolve(), ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def machine_id() -> str:
    """Which machine, boot and space of process ids this is: within it a pid and its start name one process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def process_start(pid: int) -> str:
    """When a process began, in clock ticks since boot; empty when there is none. Tells a reused pid apart."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _owners(folder: Path) -> list[dict[str, str | int]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in (folder / "owners").glob("*.json")]


def _may_live(owner: dict[str, str | int]) -> bool:
    # Of a process in another container that shares this memory nothing can be known.
    return owner["machine"] != machine_id() or process_start(int(owner["pid"])) == owner["started"]

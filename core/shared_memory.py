"""Folder of a run in the shared memory of each machine, and removal of folders that killed runs left behind."""

import contextlib
import json
import os
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LINKED = "beside"
"""Name of a link in a run's folder to a folder elsewhere, which is removed with it."""


def shared_folder(run_id: str) -> Path:
    """Return the path of a run's folder."""
    return SHARED_MEMORY / f"troupe-{run_id}"


def claim_shared(folder: Path) -> None:
    """Create the folder of a run, accessible to this user only, and register this process as an owner."""
    folder.mkdir(mode=0o700, exist_ok=True)
    owners = folder / "owners"
    owners.mkdir(exist_ok=True)
    owner = {"machine": machine_id(), "pid": os.getpid(), "started": process_start(os.getpid())}
    (owners / f"{os.getpid()}.json").write_text(json.dumps(owner), encoding="utf-8")


def leave_shared(folder: Path) -> None:
    """Unregister this process as an owner. The last owner on its machine removes the folder."""
    (folder / "owners" / f"{os.getpid()}.json").unlink(missing_ok=True)
    with contextlib.suppress(OSError, ValueError, KeyError):
        if not any(map(_may_live, _owners(folder))):
            shutil.rmtree(folder, ignore_errors=True)


def sweep_shared(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's folders on this machine whose owners have all ended. Return the removed folders."""
    removed = []
    for folder in root.glob("troupe-*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if folder.lstat().st_uid != os.getuid():
                continue  # another user's folder may hold anything, such as a pipe whose reader blocks for ever
            owners = _owners(folder)
            if owners and not any(map(_may_live, owners)):
                shutil.rmtree((folder / LINKED).resolve(), ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def machine_id() -> str:
    """Return an identifier of the machine, its boot, and the PID namespace.

    With the same identifier, a pid and its start time identify one process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def process_start(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, or an empty string if there is none.

    The start time distinguishes a process from a later one with the same pid.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _owners(folder: Path) -> list[dict[str, str | int]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in (folder / "owners").glob("*.json")]


def _may_live(owner: dict[str, str | int]) -> bool:
    # A process in another container that shares this memory cannot be inspected. To take it for dead would remove the
    # folder of a living run.
    return owner["machine"] != machine_id() or process_start(int(owner["pid"])) == owner["started"]

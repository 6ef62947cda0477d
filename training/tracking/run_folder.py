"""The folder of a run, and the lock that keeps it to one writer."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK = ".lock"


def open_run_folder(run_dir: str | Path, resume: str = "auto") -> Path:
    """Make the folder of a run, or open that of an earlier one; returns its absolute path.

    The folder is this process's until it ends, however it ends: `<run_dir>/.lock` is locked, and the kernel frees the
    lock of a killed process at once.

    Args:
        run_dir: the folder; `~` is allowed.
        resume: "none" refuses a folder that holds steps already; "auto" or a path opens it.

    Raises:
        ValueError: it cannot be made or written to, another process writes to it, or it holds the steps of an earlier
            run, which a new one would write over.
    """
    folder = Path(run_dir).expanduser().resolve()
    metrics = folder / "metrics.jsonl"
    if resume == "none" and metrics.is_file() and metrics.stat().st_size:
        raise ValueError(
            f"run_dir={run_dir} holds a run already; name another folder, set resume=auto to continue with it, "
            "or remove that one"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ValueError(f"run_dir={run_dir} cannot be written to ({error.strerror}); name another folder") from error
    try:
        # Such a lock is the process's: no child has it, and it may be taken again. It is lost when the process closes
        # the file, wherever it has opened it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(file)
        raise ValueError(
            f"run_dir={run_dir} is being written by {holder}; wait for its end, or name another folder"
        ) from None
    except OSError as error:
        # Some network file systems know no locks. That is no reason not to train.
        logger.warning("%s cannot be locked (%s); see that no other run writes there", folder, error.strerror)
        return folder
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return folder


def is_written(run_dir: Path) -> bool:
    """Return True if another process writes to the folder."""
    try:
        with (run_dir / LOCK).open("rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False

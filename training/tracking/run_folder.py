"""The folder of a run, and the lock that allows a single process to write to it."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK = ".lock"


def open_run_folder(run_dir: str | Path, resume: str = "auto") -> Path:
    """Create the folder of a run, or open an existing one. Return its absolute path.

    `<run_dir>/.lock` stays locked until this process ends. The kernel releases the lock even if the process is killed.

    Args:
        run_dir: path of the folder. `~` is expanded.
        resume: "none" refuses a folder that already holds steps. "auto" or a path opens it.

    Raises:
        ValueError: the folder cannot be created or written to, another process writes to it, or `resume` is "none" and
            it holds the steps of an earlier run, which the new run would overwrite.
    """
    folder = Path(run_dir).expanduser().resolve()
    metrics = folder / "metrics.jsonl"
    if resume == "none" and metrics.is_file() and metrics.stat().st_size:
        raise ValueError(
            f"run_dir={run_dir} already holds a run; name another folder, set resume=auto to continue that run, or "
            "remove the folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ValueError(f"run_dir={run_dir} cannot be written to ({error.strerror}); name another folder") from error
    try:
        # A POSIX lock belongs to the process: a forked child does not hold it, and this process may take it again. It
        # is lost as soon as the process closes any descriptor of the file, so `file` stays open.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(file)
        raise ValueError(
            f"{holder} is writing to run_dir={run_dir}; wait until it has ended, or name another folder"
        ) from None
    except OSError as error:
        # Some network file systems do not support locks. The run continues, and the user has to avoid a second writer.
        logger.warning("%s cannot be locked (%s); make sure that no other run writes to it", folder, error.strerror)
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

"""The folder of a run, and the lock that keeps it to one writer."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from pathlib import Path

logger = logging.getLogger(__name__)

_locks: dict[Path, int] = {}
"""Locked folders of this process, each with the open file that holds the lock."""


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir={run_dir} cannot be made ({error.strerror}); name another folder") from error
    _lock(folder, run_dir)
    metrics = folder / "metrics.jsonl"
    if resume == "none" and metrics.is_file() and metrics.stat().st_size:
        _unlock(folder)
        raise ValueError(
            f"run_dir={run_dir} holds a run already; name another folder, set resume=auto to continue with it, "
            "or remove that one"
        )
    return folder


def _lock(folder: Path, run_dir: str | Path) -> None:
    path = folder / ".lock"
    if folder in _locks:
        if _is_open_at(_locks[folder], path):
            return
        _unlock(folder)  # the folder was removed and made anew
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ValueError(f"run_dir={run_dir} cannot be written to ({error.strerror}); name another folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(file)
        raise ValueError(
            f"run_dir={run_dir} is being written by {holder}; wait for its end, or name another folder"
        ) from None
    except OSError as error:
        # Some network file systems know no locks. That is no reason not to train.
        logger.warning("%s cannot be locked (%s); see that no other run writes there", folder, error.strerror)
        os.close(file)
        return
    _locks[folder] = file
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    except OSError as error:
        logger.warning("%s could not be written (%s)", path, error.strerror)


def _is_open_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _unlock(folder: Path) -> None:
    file = _locks.pop(folder, None)
    if file is not None:
        os.close(file)


def _forget_locks() -> None:
    # The parent continues holding them; a forked child that outlived it would hold them too.
    for folder in list(_locks):
        _unlock(folder)


os.register_at_fork(after_in_child=_forget_locks)

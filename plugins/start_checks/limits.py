"""Checks of the limits of this machine and of the shell. Without them, a run would fail late or hang silently."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path
from typing import Literal

from core.shared_memory import SHARED_MEMORY

FILES_OF_RAY, FILES_OF_PROCESS = 192, 16
"""Maximum number of open files of a process of Ray, and the additional number for each process of the job."""
THREADS_OF_RAY, THREADS_OF_PROCESS = 160, 32
"""Number of threads of the processes of Ray and the driver, and of each process of the job. Measured: 134, 28 to 33."""
THREADS_OF_LOCAL_RUN = 16
"""Number of threads of a run in one process, with its reward worker. Measured: 13."""


def check_machine(backend: Literal["ray", "local"], processes: int) -> None:
    """Check that the limits of the shell and the folders of the machine allow a run.

    Args:
        backend: backend of the run.
        processes: number of processes of the job.

    Raises:
        ValueError: a limit is too low, or a folder is not writable. The message says what to set.
    """
    threads = THREADS_OF_LOCAL_RUN
    if backend == "ray":
        check_open_files(processes)
        threads = THREADS_OF_RAY + THREADS_OF_PROCESS * processes
    check_threads(threads)
    _check_folder(SHARED_MEMORY, "a run keeps its weights there", "mount a tmpfs there (docker: --shm-size=1g)")
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ValueError(f"there is no folder for temporary files ({error}); set TMPDIR to one") from error
    _check_folder(temporary, "a run keeps temporary files there", "set TMPDIR to another folder")


def check_open_files(processes: int) -> None:
    """Check that the limit on open files is high enough for Ray, which otherwise hangs for minutes.

    Raises:
        ValueError: the limit is too low.
    """
    needed = FILES_OF_RAY + FILES_OF_PROCESS * processes
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ValueError(
            f"this shell allows {soft} open files to a process (ulimit -n), and Ray with {processes} processes needs "
            f"{needed}; run `ulimit -n {needed}` first, or set backend=local"
        )


def check_threads(needed: int) -> None:
    """Check that the limit on processes of this user, which counts threads, allows `needed` more threads.

    Raises:
        ValueError: the limit is too low.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not apply the limit to root, so a low value must not stop a run of root.
    if soft == resource.RLIM_INFINITY or os.getuid() == 0:
        return
    # All processes of the user count against the limit, also those of other programs.
    used = _threads_of(os.getuid())
    if soft < used + needed:
        raise ValueError(
            f"this shell allows {soft} processes and threads to a user (ulimit -u), of which {used} are in use, and "
            f"the run needs {needed} more; run `ulimit -u {used + needed}` first, or end other processes"
        )


def _threads_of(user: int) -> int:
    """Return the number of threads of a user on this machine."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == user:
                count += len(list((folder / "task").iterdir()))
        except OSError:  # the process has ended meanwhile
            continue
    return count


def _check_folder(folder: Path, purpose: str, remedy: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A full disk creates an empty file without an error. Only written bytes show it.
            file.write(b"0" * 4096)
            file.flush()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to ({error.strerror}), and {purpose}; {remedy}") from error

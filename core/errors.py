"""The errors that core raises beside the built-in ones."""


class WorkerDied(RuntimeError):
    """A process that was asked for something is gone: killed, out of memory, or crashed below Python."""


class ResultLost(WorkerDied):
    """A worker's result is gone with the node that held it, or the worker could not be reached for it.

    Whether the call has run is not known, so only an idempotent one is sent again.
    """


class WorkerTimeout(TimeoutError):
    """Workers did not return within the time that their method is given. `missing`: (role, rank, attempt) of each."""

    missing: tuple[tuple[str, int, int], ...] = ()


class JobError(ValueError):
    """A job's description cannot work; the message says what to set."""


def first_line(error: BaseException) -> str:
    """Its type, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def with_note(error: BaseException, note: str) -> BaseException:
    """Attach a note once: the same exception object may pass several waits."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error

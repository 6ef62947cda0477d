"""Exception classes of core."""


class WorkerDied(RuntimeError):
    """Raised when a process dies during a request (killed, out of memory, or crashed in native code)."""


class ResultLost(WorkerDied):
    """Raised when the result of a call was lost with its node, or the worker was unreachable.

    The call may or may not have run, so it is sent again only if its method is idempotent.
    """


class WorkerTimeout(TimeoutError):
    """Raised when workers exceed the timeout of their method. `missing` has the (role, rank, attempt) of each."""

    missing: tuple[tuple[str, int, int], ...] = ()


class JobError(ValueError):
    """Raised for an invalid job description. The message names the setting to change."""


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def with_note(error: BaseException, note: str) -> BaseException:
    """Add a note to an exception, and return the exception."""
    # The same exception object may pass several waits: without the check its traceback would repeat the note.
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error

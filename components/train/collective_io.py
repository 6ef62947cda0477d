"""Error handling for files that all ranks write or read: disk errors with their errno, raised on all ranks together."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from components.process.system_errors import system_error_number

T = TypeVar("T")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Convert disk errors that libraries raise as other exceptions to OSError with an errno. Other errors pass.

    Args:
        what: description of the operation for the message, such as "write /runs/7".
    """
    try:
        yield
    except OSError:
        raise
    # Libraries written in Rust, such as safetensors, raise exceptions of their own when the disk is full.
    except Exception as error:
        code = _errno_in(str(error))
        if code is None:
            raise
        raise OSError(code, f"cannot {what}: {error}; look at the space, the quota and the rights there") from error


def _errno_in(message: str) -> int | None:
    """Return the errno of a message: the number that libraries written in Rust print, or that of a system error
    text.
    """
    number = system_error_number(message)
    if number is not None:
        return number
    return next((code for code in _DISK_ERRORS if os.strerror(code) in message), None)


class CollectiveIO:
    """Runner of file operations between collectives. After an error it skips further operations until `end`, so that
    this rank still takes part in the collectives and all ranks stop together.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.error: OSError | ValueError | None = None

    def run(self, work: Callable[[], T]) -> T | None:
        """Run `work` and return its result, or None after an error."""
        if self.error is None:
            try:
                with disk_errors(self.what):
                    return work()
            except (OSError, ValueError) as error:
                self.error = error
        return None

    def end(self) -> None:
        """Raise an error on all ranks if a rank has failed: its own error on that rank, and on the others an error of
        the same type that names the rank.
        """
        own_failure = None
        if self.error is not None:
            own_failure = (self.error.errno or errno.EIO if isinstance(self.error, OSError) else None, str(self.error))
        # A number and a text, because an exception of a library may not be picklable.
        failures: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, own_failure)
        # This rank raises its own error, with its traceback.
        if self.error is not None:
            raise self.error
        for rank, failure in enumerate(failures):
            if failure is not None:
                code, text = failure[0], f"rank {rank} could not {self.what}: {failure[1]}"
                raise ValueError(text) if code is None else OSError(code, text)

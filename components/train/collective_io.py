"""Files that all ranks write or read: errors of the disk by their numbers, and an end that all ranks share."""

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
    """Turn what libraries raise in place of an OSError into one, with its number; other errors pass.

    Args:
        what: is being done, as in "write /runs/7".
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        code = _errno_in(str(error))
        if code is None:
            raise
        raise OSError(code, f"cannot {what}: {error}; look at the space, the quota and the rights there") from error


def _errno_in(message: str) -> int | None:
    """The error number that libraries written in Rust print, or that the system's words stand for."""
    number = system_error_number(message)
    if number is not None:
        return number
    return next((code for code in _DISK_ERRORS if os.strerror(code) in message), None)


class CollectiveIO:
    """Work on files between collectives. After an error it is left out, until all ranks can stop together."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.error: OSError | ValueError | None = None

    def do(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None once something has failed."""
        if self.error is None:
            try:
                with disk_errors(self.what):
                    return work()
            except (OSError, ValueError) as error:
                self.error = error
        return None

    def end(self) -> None:
        """Raise on all ranks if one has failed: there its own error, elsewhere one of its kind that names it."""
        mine = None
        if self.error is not None:
            mine = (self.error.errno or errno.EIO if isinstance(self.error, OSError) else None, str(self.error))
        all_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_ranks, mine)
        if self.error is not None:
            raise self.error
        for rank, failure in enumerate(all_ranks):
            if failure is not None:
                code, text = failure[0], f"rank {rank} could not {self.what}: {failure[1]}"
                raise ValueError(text) if code is None else OSError(code, text)

"""logs/driver.log: output of Ray and other libraries in the driver process, which would clutter the screen."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def driver_log(path: Path, info: Callable[[str], None], descriptors: tuple[int, ...]) -> Iterator[None]:
    """Redirect file descriptors to a log file inside the block.

    If the file cannot be opened, a warning is logged and nothing is redirected.

    Args:
        path: path of the file.
        info: prints a line for the user. It also receives the warnings that this project and the user's code log.
        descriptors: file descriptors to redirect. 2 (stderr) must be one of them.
    """
    with ExitStack() as undo:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            undo.callback(os.close, log)
            for descriptor in descriptors:
                undo.enter_context(_redirected(log, descriptor))
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)
        else:
            undo.enter_context(_logging_to(path, info))
        yield


@contextmanager
def _redirected(target: int, descriptor: int) -> Iterator[None]:
    # Text in Python's buffer would otherwise be written to the other file later.
    _flush()
    # The descriptor itself is replaced, because native code and child processes do not use sys.stderr.
    before = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield
    finally:
        _flush()
        os.dup2(before, descriptor)
        os.close(before)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A full disk loses the buffered text. An error here would end the run for it.
        try:
            stream.flush()
        except OSError as error:
            logger.debug("not flushed: %s", error)


@contextmanager
def _logging_to(path: Path, info: Callable[[str], None]) -> Iterator[None]:
    """Log all warnings to the file, with their times, and warnings of our code and the user's code to `info`."""
    to_file, to_screen = _CountingFile(path, encoding="utf-8", errors="backslashreplace"), _OwnWarnings(info)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for handler in (to_file, to_screen):
        handler.setLevel(logging.WARNING)
        logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        for handler in (to_file, to_screen):
            logging.getLogger().removeHandler(handler)
            # A full disk loses the last lines of the log. Its error would hide the one that ended the run.
            with suppress(OSError):
                handler.close()
        if to_file.lost:
            info(f"warning: {to_file.lost} warnings could not be written to {path} ({to_file.reason})")


class _CountingFile(logging.FileHandler):
    """A log file that counts the records that cannot be written. Python's own class prints a traceback for each."""

    lost = 0
    """Number of records that could not be written."""
    reason = ""
    """Error of the last one."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        # Other errors are bugs, such as a format string with too few arguments. Their traceback shows the place.
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.lost += 1
        self.reason = error.strerror or type(error).__name__


class _OwnWarnings(logging.Handler):
    """Shows warnings that do not come from an installed package. The processes of a job apply the same rule."""

    def __init__(self, info: Callable[[str], None]) -> None:
        super().__init__()
        self._info = info

    def emit(self, record: logging.LogRecord) -> None:
        if "site-packages" not in record.pathname and not record.pathname.startswith(sys.base_prefix):
            self._info(f"warning: {record.getMessage()}")

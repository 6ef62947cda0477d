"""logs/driver.log: what Ray and other libraries write in the driver while a job runs, kept off the screen."""

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
    """Let what is written to file descriptors, 2 among them, go to a file while the block lasts.

    Warnings that the project's and the user's own code logs are said too. A file that cannot be opened leaves
    everything as it is, with a warning.
    """
    with ExitStack() as undo:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            undo.callback(os.close, log)
            for descriptor in descriptors:
                undo.enter_context(_led_to(log, descriptor))
        except OSError as error:
            logger.warning("%s is not written: %s", path, error)
        else:
            undo.enter_context(_logging_to(path, info))
        yield


@contextmanager
def _led_to(target: int, descriptor: int) -> Iterator[None]:
    _flush()
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
        # On a full disk there is nothing to be done about what does not fit.
        try:
            stream.flush()
        except OSError as error:
            logger.debug("not flushed: %s", error)


@contextmanager
def _logging_to(path: Path, info: Callable[[str], None]) -> Iterator[None]:
    """Let all warnings go to the file, with their time, and our own to `info`."""
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
            # On a full disk the last lines of the log are lost; what ended the run is what has to be read.
            with suppress(OSError):
                handler.close()
        if to_file.lost:
            info(f"warning: {to_file.lost} warnings could not be written to {path} ({to_file.reason})")


class _CountingFile(logging.FileHandler):
    """A log file that counts what cannot be written. Python's own prints a traceback for each of these."""

    lost = 0
    """Number of records that are not in the file."""
    reason = ""
    """Error of the latest one."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.lost += 1
        self.reason = error.strerror or type(error).__name__


class _OwnWarnings(logging.Handler):
    """The same rule as in the processes of a job: what comes from no installed package is for the user."""

    def __init__(self, info: Callable[[str], None]) -> None:
        super().__init__()
        self._info = info

    def emit(self, record: logging.LogRecord) -> None:
        if "site-packages" not in record.pathname and not record.pathname.startswith(sys.base_prefix):
            self._info(f"warning: {record.getMessage()}")

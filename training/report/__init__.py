"""report.html: a run in one file that opens without a network."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

REWRITE_EVERY_S = 30.0
SHARE = 0.02
"""At most so much of the time goes into the report of a run that is not at its end."""
LAST_WAIT_S = 120.0
"""So long a run waits at its end for a report that is being written (a disk may hang)."""


@contextmanager
def reporting(run_dir: Path) -> Iterator[None]:
    """Keep `run_dir/report.html` current while the block lasts, and write it once more at its end."""
    keeper = _Keeper(run_dir)
    keeper.start()
    try:
        yield
    finally:
        keeper.finish()


class _Keeper(threading.Thread):
    """Writes the report of a run now and then. After its first failure it says so once, and is off."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(name="report", daemon=True)
        self._run_dir = run_dir
        self._ended = threading.Event()
        self._seen: object = None
        self._off = False

    def run(self) -> None:
        wait_s = REWRITE_EVERY_S
        while not self._ended.wait(wait_s) and not self._off:
            began = time.monotonic()
            self._write()
            wait_s = max(REWRITE_EVERY_S, (time.monotonic() - began) / SHARE)

    def finish(self) -> None:
        """Write the report for the last time, and say where it is."""
        self._ended.set()
        self.join(LAST_WAIT_S)
        if self.is_alive():
            logger.warning("%s is not done after %g s, and stays as it is", self._run_dir / "report.html", LAST_WAIT_S)
        elif self._write():
            # A terminal that is gone, a pipe that nobody reads: the run has ended well all the same.
            with contextlib.suppress(OSError, ValueError):
                print(f"report: {self._run_dir / 'report.html'}", flush=True)

    def _write(self) -> bool:
        """Write the report if anything changed; whether it is there."""
        if self._off:
            return False
        try:
            # Only here: a run that ends at once need not wait for it.
            from training.report.page import RUN_FILES, write_report

            files = [self._run_dir / name for name in RUN_FILES]
            now = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.is_file()]
            if now != self._seen:
                write_report([self._run_dir], self._run_dir / "report.html")
                self._seen = now
        # A full disk, a file of a kind that nobody thought of: the run continues whatever it is.
        except Exception as error:  # noqa: BLE001
            self._off = True
            logger.warning("report.html of %s is switched off: %s: %s", self._run_dir, type(error).__name__, error)
            return False
        return True

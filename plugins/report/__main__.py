"""Keeps the report of a run current: `python -m plugins.report RUN [SECONDS]` writes it at most so often while the run
writes, and once more when stdin has a line, or has ended with whoever started it. scripts/report.py is for people.
"""

from __future__ import annotations

import multiprocessing
import select
import sys
import time
from pathlib import Path

from components.process.streams import accept_any_text
from plugins.report.program import RUN_FILES

SHARE = 0.02
"""At most so much of the time goes into the report of a run that is not at its end."""


def follow(run_dir: Path, every_s: float = 30.0) -> None:
    """Write the report again and again where the run has written something, until stdin says that it has ended."""
    written, wait_s = None, every_s
    while not select.select([sys.stdin], [], [], wait_s)[0]:
        began = time.monotonic()
        files = [run_dir / name for name in RUN_FILES if (run_dir / name).is_file()]
        found = [(path, path.stat().st_mtime_ns) for path in files]
        if found != written:
            write(run_dir)
            written = found
        wait_s = max(every_s, (time.monotonic() - began) / SHARE)
    write(run_dir)


def write(run_dir: Path) -> None:
    """Write the report, in a process of its own, so that what a long run's takes is given back each time."""
    writing = multiprocessing.get_context("fork").Process(target=_write, args=(run_dir,))
    writing.start()
    writing.join()
    if writing.exitcode:
        raise SystemExit(writing.exitcode)


def _write(run_dir: Path) -> None:
    from plugins.report.page import write_report

    write_report([run_dir], run_dir / "report.html")


if __name__ == "__main__":
    accept_any_text()
    follow(Path(sys.argv[1]), *map(float, sys.argv[2:]))

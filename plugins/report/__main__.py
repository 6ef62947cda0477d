"""Keeps the report of a run current: `python -m plugins.report RUN [SECONDS]`.

It writes the report at most every SECONDS seconds while the run writes files. It writes it a last time when stdin has a
line, or is closed because the process that started it has ended. To write a report by hand, use scripts/report.py.
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
"""Maximum share of the time that is spent on reports of a run that has not ended."""


def follow(run_dir: Path, every_s: float = 30.0) -> None:
    """Write the report whenever the run has written something, until stdin has a line or is closed."""
    last_seen: list[tuple[Path, int]] = []
    wait_s = every_s
    while not select.select([sys.stdin], [], [], wait_s)[0]:
        began = time.monotonic()
        files = [run_dir / name for name in RUN_FILES if (run_dir / name).is_file()]
        modified = [(path, path.stat().st_mtime_ns) for path in files]
        if modified != last_seen:
            write(run_dir)
            last_seen = modified
        wait_s = max(every_s, (time.monotonic() - began) / SHARE)
    write(run_dir)


def write(run_dir: Path) -> None:
    """Write the report in a child process, so that the memory for a long run is released each time."""
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

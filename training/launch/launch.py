"""From a checked job to its end: what main.py of every recipe does once it knows what is to run.

Nothing here needs torch.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from components.registry import find, names
from core import Job
from core.backends import BackendName
from training.launch.machines import cores_here
from training.launch.programs import start_program
from training.terminal.terminal import Terminal
from training.terminal.view import LIVE, VIEW, printable
from training.tracking import EventLog, config_text, finish_summary, redact
from training.tracking.observers import OBSERVER, RunObserver, close_observers

logger = logging.getLogger(__name__)

REPORT_WITHIN_S = 120.0
"""So long a run waits at its end for its report (a disk may hang)."""
REPORT, HTML = "report program", "html"
"""Kind and name of the plug-in that provides the report: the name of a module for `python -m`. It is started with the
run folder as its argument, and ends after it has read a line, or the end, of its stdin."""
ON_BY_DEFAULT = {"alarms": (OBSERVER, "alarms"), "live view": (VIEW, LIVE), "report": (REPORT, HTML)}
"""Capabilities that a run has without an option if their plug-ins are there: kind and name by title."""
STOP_GRACE_S = 600.0
"""Seconds that a step may still take after Ctrl-C, with the checkpoint that follows it."""


def threads_each(workers: int, nodes: int = 1) -> int:
    """Threads for each of so many processes that work at the same time on the cores of this machine.

    Those that work one after the other may each be given all of them. OMP_NUM_THREADS, where it is set, stands for the
    number of cores. On other machines it is a part of the cores that these turn out to have.

    Args:
        workers: on all nodes together.
        nodes: over which they are spread evenly.
    """
    cores = cores_here()
    if cores is None:
        return -max(1, math.ceil(workers / nodes))
    given = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, (int(given) if given.isdecimal() else cores) // workers)


def threads_text(threads: int) -> str:
    """`2 threads`, or how they are found where the cores are not known; as `threads_each` gives them."""
    if threads < 0:
        return "all cores" if threads == -1 else f"1/{-threads} of the cores"
    return f"{threads} thread{'s' * (threads > 1)}"


def printed(config: Any, named: Collection[str]) -> str:
    """A configuration as YAML that `--config` reads: without the options that only print, and without the folder of the
    run unless it is among the options that were named.
    """
    options = dict(redact(config))
    for name in ("print_config", "dry_run", "assume_devices", *(() if "run_dir" in named else ("run_dir",))):
        options.pop(name, None)
    return config_text(options)


def run_job(
    job: Job,
    *,
    recipe: str,
    run_dir: Path,
    seed: int,
    backend: BackendName,
    began: float,
    lines: Sequence[str] = (),
    seconds: Mapping[str, float] | None = None,
    observers: Sequence[RunObserver] = (),
) -> int:
    """Run a job to its end, close its summary, and say how it ended.

    Args:
        job: what to run.
        recipe: its recipe, for messages and the summary.
        run_dir: its folder, made by `open_run_folder`.
        seed: for the summary.
        backend: "ray" or "local".
        began: seconds since the epoch at which the user started it.
        lines: what a person should read before it starts.
        seconds: what took time before it starts, as summary.json names it.
        observers: observers of the run; they are closed at its end.

    Returns:
        The exit code: 0 finished, 1 failed, 130 stopped.
    """
    events, sizes = EventLog(run_dir / "events.jsonl"), role_sizes(job)
    with reporting(run_dir):
        with Terminal(recipe, run_dir, sizes, backend, began) as terminal:
            receivers = [events, terminal, *observers]

            def emit(event: Any) -> None:
                for receiver in receivers:
                    receiver(event)

            for line in (f"run folder {run_dir}", *lines):
                terminal.info(f"{recipe}: {line}")
            for line in (*missing_defaults(), *(line for each in observers for line in each.start(run_dir, emit))):
                terminal.info(f"{recipe}: {line}")
            logs = run_dir / "logs"
            result = job.submit(recipe, backend=backend, log_dir=logs, began=began, observers=receivers)
        events.close()
        close_observers(observers)
        finish_summary(
            run_dir,
            result.status,
            result.error or None,
            recipe=recipe,
            seed=seed,
            peak_memory_bytes=result.peak_memory_bytes,
            seconds=dict(seconds or {}),
            attempts=result.attempt,
        )
    if result.output and result.status == "failed":
        print("\n".join(printable(line) for line in result.output.splitlines()), file=sys.stderr)
    if result.status != "finished":
        where = f"; logs in {logs}" if backend == "ray" else ""
        print(f"{recipe}: {result.status}: {printable(result.error)}{where}", file=sys.stderr)
    return result.exit_code


def role_sizes(job: Job) -> dict[str, int]:
    """Return the number of workers of each role."""
    return {name: role.total for name, role in job.roles.items()}


def missing_defaults() -> list[str]:
    """Return a line with the capabilities of `ON_BY_DEFAULT` whose plug-ins are not installed; none if all are."""
    missing = [title for title, (kind, name) in ON_BY_DEFAULT.items() if name not in names(kind)]
    return [f"plug-ins that are not installed: {', '.join(missing)}; the run continues without them"] if missing else []


@contextmanager
def reporting(run_dir: Path) -> Iterator[None]:
    """Keep `run_dir/report.html` current in a separate process while the block lasts, and write it at its end.

    A failure of that process is one warning. Without a plug-in that provides the report there is none.
    """
    module: str | None = find(REPORT, HTML)
    if module is None:
        yield
        return
    report, pipe = run_dir / "report.html", subprocess.PIPE
    # In a session of its own, so that Ctrl-C is the run's.
    program = start_program(module, str(run_dir), stdin=pipe, stderr=pipe, start_new_session=True)
    try:
        yield
    finally:
        try:
            # A line, as a process that was forked meanwhile may keep its stdin open.
            _, errors = program.communicate("end\n", timeout=REPORT_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
            errors = f"it was not done after {REPORT_WITHIN_S:g} s"
        if program.returncode != 0:
            logger.warning("%s is not up to date: %s", report, errors.strip().rpartition("\n")[2])
        else:
            # A terminal that is gone, a pipe that nobody reads: the run has ended well all the same.
            with suppress(OSError, ValueError):
                print(f"report: {report}", flush=True)

"""Start of a checked job, its observers and its end, for main.py of every recipe.

This module does not import torch.
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
from training.launch.machines import cores_here, counted
from training.launch.programs import start_program
from training.terminal.terminal import Terminal
from training.terminal.view import LIVE, VIEW, printable
from training.tracking import EventLog, config_text, finish_summary, redact
from training.tracking.observers import OBSERVER, RunObserver, close_observers

logger = logging.getLogger(__name__)

REPORT_WITHIN_S = 120.0
"""Timeout of the report at the end of a run, in seconds. A disk may hang."""
REPORT, HTML = "report program", "html"
"""Kind and name of the plug-in that provides the report: the name of a module for `python -m`. The module gets the run
folder as its argument, and ends after it has read a line or the end of its stdin."""
ON_BY_DEFAULT = {
    "alarms": (OBSERVER, "alarms"),
    "live view": (VIEW, LIVE),
    "report": (REPORT, HTML),
    "utilisation of GPUs": ("utilisation", "gpu"),
}
"""Capabilities that need no option if their plug-ins are installed: kind and name by title."""
GUARDS = {
    "start_checks": ("start check", "limits of the machine, free space and a trial export are not checked"),
    "tokenizer_trial": ("tokenizer trial", "tokenizer and chat template are not tried in a process of their own"),
    "model_checks": ("model check", "files, vocabulary and positions of the model are not checked before the start"),
    "provenance": ("run record", "versions, git state and hardware are not recorded in environment.json"),
    "node_layout": ("node layout", "the node of each worker is not planned"),
    "driver_log": ("driver log", "output of libraries in the driver is not kept in logs/driver.log"),
}
"""Plug-ins that protect every run: the kind of their objects, and the effect of a missing folder."""
STOP_GRACE_S = 600.0
"""Maximum time in seconds for the current step and its checkpoint after Ctrl-C."""


def threads_each(workers: int, nodes: int = 1) -> int:
    """Return the number of threads per process, for processes that share the cores of a machine.

    Processes that work one after the other may each use all cores. OMP_NUM_THREADS, if it is set, replaces the number
    of cores. If the cores are not known, because the run is on other machines, -n stands for 1/n of the cores.

    Args:
        workers: number of processes on all nodes together.
        nodes: number of nodes that they are spread over evenly.
    """
    cores = cores_here()
    if cores is None:
        return -max(1, math.ceil(workers / nodes))
    threads_of_user = os.environ.get("OMP_NUM_THREADS", "")
    if threads_of_user.isdecimal():
        cores = int(threads_of_user)
    # More threads than cores would make every process wait for the others at each synchronization of its threads.
    return max(1, cores // workers)


def threads_text(threads: int) -> str:
    """Describe a result of `threads_each`: "2 threads", or a share of the cores if their number is not known."""
    if threads == -1:
        return "all cores"
    if threads < 0:
        return f"1/{-threads} of the cores"
    return counted(threads, "thread")


def printed(config: Any, named: Collection[str]) -> str:
    """Return a configuration as YAML for `--config`.

    Options that only print are left out. So is run_dir, unless it is among the options that the user has `named`.
    """
    # A default run_dir names the time of this run. In a configuration file, it would make the next run continue here.
    omitted = {"print_config", "dry_run", "assume_devices", "emit", "rehearse"} | ({"run_dir"} - set(named))
    return config_text({name: value for name, value in redact(config).items() if name not in omitted})


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
    """Run a job to its end, write its summary, and report its status.

    Args:
        job: job to run.
        recipe: name of the recipe, for messages and the summary.
        run_dir: run folder, created by `open_run_folder`.
        seed: seed, for the summary.
        backend: "ray" or "local".
        began: time of the start of the command, in seconds since the epoch.
        lines: lines to print before the job starts.
        seconds: durations before the start, by their name in summary.json.
        observers: observers of the run. They are closed at its end.

    Returns:
        The exit code: 0 finished, 1 failed, 130 stopped.
    """
    events = EventLog(run_dir / "events.jsonl")
    with reporting(run_dir):
        with Terminal(recipe, run_dir, role_sizes(job), backend, began) as terminal:
            receivers = [events, terminal, *observers]

            def emit(event: Any) -> None:
                for receiver in receivers:
                    receiver(event)

            for text in (f"run folder {run_dir}", *lines):
                terminal.info(f"{recipe}: {text}")
            for text in (*missing_defaults(), *(text for each in observers for text in each.start(run_dir, emit))):
                terminal.info(f"{recipe}: {text}")
            logs = run_dir / "logs"
            result = job.submit(recipe, backend=backend, log_dir=logs, began=began, observers=receivers)
        # Closed before the summary is written: a program that waits for the summary then finds all events.
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
    # Output of a worker may hold control characters, which would change how the terminal shows the text after it.
    if result.output and result.status == "failed":
        print("\n".join(printable(text) for text in result.output.splitlines()), file=sys.stderr)
    if result.status != "finished":
        error = printable(result.error)
        if backend == "ray":
            error += f"; logs in {logs}"
        print(f"{recipe}: {result.status}: {error}", file=sys.stderr)
    return result.exit_code


def role_sizes(job: Job) -> dict[str, int]:
    """Return the number of workers of each role."""
    return {name: role.total for name, role in job.roles.items()}


def missing_defaults() -> list[str]:
    """Return a line with the missing capabilities of `ON_BY_DEFAULT`, and a line for each missing one of `GUARDS`."""
    missing = [title for title, (kind, name) in ON_BY_DEFAULT.items() if name not in names(kind)]
    lines = [f"plug-in {plugin} is missing: {effect}" for plugin, (kind, effect) in GUARDS.items() if not names(kind)]
    if missing:
        lines.append(f"plug-ins that are not installed: {', '.join(missing)}; the run continues without them")
    return lines


@contextmanager
def reporting(run_dir: Path) -> Iterator[None]:
    """Update `run_dir/report.html` in a separate process during the block, and write it a last time at the end.

    A failure of that process causes one warning. Without a plug-in for the report, nothing is written.
    """
    module: str | None = find(REPORT, HTML)
    if module is None:
        yield
        return
    report = run_dir / "report.html"
    # In a new session, because Ctrl-C in the terminal would otherwise end the report together with the run.
    program = start_program(module, str(run_dir), stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        try:
            # A line instead of closing stdin: a process that was forked in the meantime may hold the pipe open.
            _, errors = program.communicate("end\n", timeout=REPORT_WITHIN_S)
        except subprocess.TimeoutExpired:
            # The whole group, because a child of the report could keep the pipes open.
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
            errors = f"it was not done after {REPORT_WITHIN_S:g} s"
        if program.returncode != 0:
            logger.warning("%s is not up to date: %s", report, errors.strip().rpartition("\n")[2])
        else:
            # The terminal may be closed, or nobody reads the pipe. That must not fail a run that has finished.
            with suppress(OSError, ValueError):
                print(f"report: {report}", flush=True)

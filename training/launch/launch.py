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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core import Job
from core.backends import BackendName
from plugins.alarms.alarms import Alarms
from plugins.live_view.run_view import printable
from training.launch.machines import cores_here
from training.launch.programs import start_program
from training.options.schema import options_of
from training.terminal.terminal import Terminal
from training.tracking import EventLog, StepEvent, config_text, finish_summary, redact

if TYPE_CHECKING:
    from plugins.monitoring.endpoint import MetricsEndpoint

logger = logging.getLogger(__name__)

REPORT_WITHIN_S = 120.0
"""So long a run waits at its end for its report (a disk may hang)."""
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
    endpoint: MetricsEndpoint | None = None,
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
        endpoint: serves the state of the run until it ends.

    Returns:
        The exit code: 0 finished, 1 failed, 130 stopped.
    """
    events, sizes = EventLog(run_dir / "events.jsonl"), {name: role.total for name, role in job.roles.items()}
    config = getattr(job, "config", None)
    # A KL to another model is not 0 before the first update.
    silent = () if getattr(config, "starts_as_reference", True) else ("start",)
    with reporting(run_dir):
        with Terminal(recipe, run_dir, sizes, backend, began) as terminal:
            for line in (f"run folder {run_dir}", *lines):
                terminal.info(f"{recipe}: {line}")
            state = [endpoint.state] if endpoint is not None else []
            if endpoint is not None:
                terminal.info(f"{recipe}: metrics at {endpoint.url}/metrics and {endpoint.url}/state")

            def show(alarm: Any) -> None:
                for observer in (terminal, *state):
                    observer(alarm)

            observers = [
                events,
                terminal,
                *state,
                alarm_observer(events, show, options_in_use(config), silent),
            ]
            logs = run_dir / "logs"
            result = job.submit(recipe, backend=backend, log_dir=logs, began=began, observers=observers)
        events.close()
        if endpoint is not None:
            endpoint.close()
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


def open_endpoint(config: Any, job: Job, recipe: str) -> MetricsEndpoint | None:
    """Bind the monitoring endpoint of a run, or return None without `log.metrics_port`.

    Raises:
        OSError: the port cannot be used.
    """
    if config.log.metrics_port is None:
        return None
    from plugins.monitoring.endpoint import MetricsEndpoint, RunState

    state = RunState(recipe, {name: role.total for name, role in job.roles.items()})
    return MetricsEndpoint(state, config.log.metrics_host, config.log.metrics_port)


@contextmanager
def reporting(run_dir: Path) -> Iterator[None]:
    """Let a program of its own keep `run_dir/report.html` current while the block lasts, and write it once more at the
    end. It takes nothing from the run, and what goes wrong with it is one warning.
    """
    report, pipe = run_dir / "report.html", subprocess.PIPE
    # In a session of its own, so that Ctrl-C is the run's.
    program = start_program("plugins.report", str(run_dir), stdin=pipe, stderr=pipe, start_new_session=True)
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


def options_in_use(config: Any) -> set[str]:
    """Names of the options that change something in a run with this configuration."""
    names = {option.name for option in options_of(type(config))} if is_dataclass(config) else set[str]()
    agent = getattr(config, "agent", None)
    return names if agent and agent.func_path else {name for name in names if not name.startswith("agent.")}


def alarm_observer(
    events: EventLog, terminal: Callable[[Any], None], options: Collection[str], silent: Collection[str] = ()
) -> Callable[[Any], None]:
    """An observer that looks at the metrics of every step, and says and writes down what is wrong with them, with what
    to try by these options. Alarms that are `silent` mean nothing in this run.
    """
    alarms = Alarms(options, silent)
    alarms.recall(events.path.parent)

    def look(event: Any) -> None:
        if isinstance(event, StepEvent):
            for alarm in alarms.look(event.step, event.metrics):
                events(alarm)
                terminal(alarm)

    return look

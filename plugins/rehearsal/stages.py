"""The small run of a rehearsal: two steps, an evaluation, a checkpoint, the loss of workers, and a resumed run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from components.process.import_path import with_our_path
from plugins.rehearsal.table import DOUBTFUL, FAILED, PartFailedError, Table
from training.tracking.serialization import json_lines

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.1
START_S = 600.0
"""Timeout of the first step. A busy machine needs minutes to import the libraries in every process."""
STEP_S = 300.0
"""Timeout of a step, and of the recovery after the loss of a worker."""
END_S = 300.0
"""Timeout of the end of a run, with an evaluation, a checkpoint and an export."""
STEPS = 2
"""Number of training steps before the first worker is killed."""
_PROCESS = re.compile(r"^\S+: process (\d+) on ", re.MULTILINE)
_ANSWERED = ("replaced", "restart")
"""Kinds of events that follow the loss of a worker."""


class SmallRun:
    """A run of the recipe in a child process, and the files that it has written so far."""

    def __init__(self, module: str, arguments: Sequence[str], folder: Path, checkpoints: Path) -> None:
        """
        Args:
            module: main module of the recipe.
            arguments: arguments of the run.
            folder: folder of the rehearsal.
            checkpoints: folder of the checkpoints of the run.
        """
        self.run_dir = folder / "run"
        self.checkpoints = checkpoints
        self._log = folder / "output.log"
        self._command = [sys.executable, "-P", str(ROOT / "scripts" / "early_stop.py"), module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Start the run, or resume it, with further options."""
        # The cluster, its GPUs and the servers of trackers are not part of a rehearsal.
        environment = with_our_path(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline"}
        for name in ("RAY_ADDRESS", "WANDB_API_KEY"):
            environment.pop(name, None)
        with self._log.open("ab") as log:
            # A session of its own, so that Ctrl-C reaches the run once, from here.
            self._process = subprocess.Popen(
                [*self._command, *options],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self) -> list[dict[str, Any]]:
        """Return the metrics of all steps and evaluations so far."""
        return list(json_lines(self.run_dir / "metrics.jsonl"))

    def step(self) -> int:
        """Return the last logged training step, or 0."""
        return max((int(line["step"]) for line in self.lines()), default=0)

    def events(self, kinds: Sequence[str], since: float = 0.0) -> list[dict[str, Any]]:
        """Return the events of a job of these kinds after a time in seconds since the epoch."""
        events = json_lines(self.run_dir / "events.jsonl", b'{"event": "job"')
        return [event for event in events if event["kind"] in kinds and event["time"] >= since]

    def workers(self) -> dict[str, int]:
        """Return the process id of the worker with the highest rank of each role, by the name of its log."""
        pids: dict[str, tuple[str, int]] = {}
        for log in sorted((self.run_dir / "logs").glob("*-*.log")):
            starts = _PROCESS.findall(log.read_text(encoding="utf-8", errors="replace"))
            if starts:
                pids[log.stem.rpartition("-")[0]] = log.stem, int(starts[-1])
        return dict(pids.values())

    def wait(self, condition: Callable[[], object], limit_s: float, aim: str) -> None:
        """Wait for a condition.

        Raises:
            PartFailedError: the run ends, hangs or exceeds the limit before.
        """
        assert self._process is not None
        deadline = time.monotonic() + limit_s
        began = time.time()
        while not condition():
            if self._process.poll() is not None and not condition():
                raise PartFailedError(f"the run ended before {aim}: {self.last_message()}")
            if hung := self.events(("hung",), began):
                raise PartFailedError(f"{hung[0]['process']} hangs before {aim}: {hung[0]['text']}")
            if time.monotonic() > deadline:
                raise PartFailedError(f"not reached within {limit_s:g} s: {aim}; last output: {self.last_message()}")
            time.sleep(POLL_S)

    def end(self, limit_s: float) -> int:
        """Wait for the end of the run. Return its exit code.

        Raises:
            PartFailedError: it exceeds the limit.
        """
        self.wait(lambda: self._process is None or self._process.poll() is not None, limit_s, "the end of the run")
        assert self._process is not None
        return int(self._process.returncode)

    def interrupt(self) -> None:
        """Ask the run to stop after its step and to write a checkpoint, as Ctrl-C does."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End the run at once, if it is still running."""
        if self._process is not None and self._process.poll() is None:
            # Its workers and its Ray notice the end of the driver and end themselves.
            self._process.kill()
            self._process.wait()

    def last_message(self) -> str:
        """Return the last line of the output that says why the run has ended, or else the last line."""
        lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        reasons = [line for line in lines if re.match(r"[a-z_]+: (failed|stopped): ", line)]
        return (reasons or lines or ["no output"])[-1]

    def warnings(self) -> list[str]:
        """Return the warnings of the run so far."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line.partition("warning: ")[2] for line in lines if "warning: " in line]


def rehearse_run(table: Table, run: SmallRun, *, evaluates: bool, resumes_with: Callable[[int], list[str]]) -> None:
    """Rehearse a run with everything that happens in it. The first failed part ends the rehearsal of the run.

    Args:
        table: receives the verdicts.
        run: the run, which is started here.
        evaluates: True if the run evaluates.
        resumes_with: returns the options of the resumed run, from the number of the last step.
    """
    part = "start"
    try:
        began = time.monotonic()
        run.start()
        run.wait(run.lines, START_S, "the first step or evaluation")
        workers = len(list((run.run_dir / "logs").glob("*-*.log")))
        table.passed(part, f"{workers} processes, first metrics after {time.monotonic() - began:.0f} s")
        part = "training"
        run.wait(lambda: run.step() >= STEPS, STEP_S, f"step {STEPS}")
        _describe_steps(table, run)
        part = "checkpoint"
        run.wait(lambda: _is_saved(run), STEP_S, "the first checkpoint")
        table.passed(part, f"written to {run.checkpoints}")
        for name in sorted(run.workers(), key=lambda worker: (worker.startswith("trainer"), worker)):
            part = f"kill {name}"
            _kill(table, run, name)
        part = "stop, resume"
        run.interrupt()
        run.end(END_S)
        last = run.step()
        run.start(*resumes_with(last))
        if (code := run.end(START_S)) != 0:
            raise PartFailedError(f"the resumed run ends with code {code}: {run.last_message()}")
        if run.step() <= last:
            raise PartFailedError(f"the resumed run has made no step after step {last}")
        table.passed(part, f"stopped after step {last}, resumed to step {run.step()}")
        part = "evaluation"
        if evaluates:
            _describe_evaluation(table, run)
    except PartFailedError as error:
        table.add(part, FAILED, str(error))
    finally:
        run.kill()


def _describe_steps(table: Table, run: SmallRun) -> None:
    lines = [line for line in run.lines() if line["step"]]
    phases = {"generation": ("timing_s/generate", "timing_s/gen"), "weight sync": ("timing_s/sync",)}
    for part, names in phases.items():
        seconds = [line[name] for line in lines for name in names if name in line]
        if seconds:
            table.passed(part, f"{len(seconds)} times, {max(seconds):.1f} s at most on this machine")
    losses = [line[name] for line in lines for name in line if name.endswith("/loss")]
    broken = sorted({name for line in lines for name in line.get("nonfinite", ()) if "loss" in name})
    if broken:
        raise PartFailedError(f"{', '.join(broken)} is not finite in the first steps")
    text = f"{len(lines)} steps"
    if losses:
        text += f", loss {losses[0]:.4g}"
    if failed := sum(line.get("reward/failed", 0) for line in lines):
        table.add("rewards", DOUBTFUL, f"{failed:g} responses of a random model have no reward; see failed/ of the run")
    table.passed("training", text)


def _is_saved(run: SmallRun) -> bool:
    """Return True if there is a complete checkpoint.

    Raises:
        PartFailedError: a checkpoint could not be written. The run itself continues without it.
    """
    if any(line.get("perf/checkpoints_failed") for line in run.lines()):
        problems = [warning for warning in run.warnings() if "checkpoint" in warning or "step" in warning]
        raise PartFailedError((problems or ["a checkpoint could not be written"])[0])
    return any(folder.is_dir() for folder in run.checkpoints.glob("step_*"))


def _kill(table: Table, run: SmallRun, name: str) -> None:
    """Kill a worker, and wait until the run has made another step without it."""
    before = run.step()
    began = time.time()
    try:
        os.kill(run.workers()[name], signal.SIGKILL)
    except ProcessLookupError:
        raise PartFailedError("its process had ended already") from None
    run.wait(lambda: run.events(_ANSWERED, began), STEP_S, f"the recovery from the loss of {name}")
    kind = run.events(_ANSWERED, began)[0]["kind"]
    # The trainer repeats the steps after the checkpoint, so a line of the same step counts too.
    run.wait(lambda: any(line["time"] > began and line["step"] >= before for line in run.lines()), STEP_S, "a step")
    how = {"replaced": "replaced", "restart": "the job restarted from its checkpoint"}[kind]
    table.passed(f"kill {name}", f"{how}; next step after {time.time() - began:.0f} s")


def _describe_evaluation(table: Table, run: SmallRun) -> None:
    lines = [line for line in run.lines() if any(name.startswith(("eval/", "val-")) for name in line)]
    if not lines:
        raise PartFailedError("no evaluation was logged")
    names = [name for name in lines[-1] if name.startswith(("eval/", "val-"))]
    table.passed("evaluation", f"{len(lines)} times; logs {', '.join(names[:3])}")

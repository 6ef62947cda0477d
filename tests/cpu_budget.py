"""Budget of a test suite in CPU seconds of all its processes, so that a busy machine causes no failure.

A core does less work per second while other processes share its caches. The seconds are therefore converted to those of
a reference core: a fixed piece of work is timed continuously, and if it takes twice as long, two seconds count as one.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

SAMPLE_EVERY_S = 0.5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
REFERENCE_S = 0.0014
"""CPU seconds of `sample_speed` on the reference core of the budgets, while two tests run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which scripts/test.sh sets the budget of a tier."""
    parser.addoption("--cpu-budget", type=float, help="CPU seconds that the session may take, all processes together")


def pytest_configure(config: pytest.Config) -> None:
    """Start counting in the main process of pytest."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CpuBudget(config.getoption("--cpu-budget")))


class Process(NamedTuple):
    """A process in /proc. Process id and start time together are unique."""

    pid: int
    started: int
    parent: int
    cpu_s: float


def running_processes() -> list[Process]:
    """Return all processes of this machine with the CPU seconds of their threads."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended in the meantime
            continue
        cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        processes.append(Process(int(folder.name), int(fields[19]), int(fields[1]), cpu_s))
    return processes


def sample_speed() -> float:
    """Return the CPU seconds of this thread for a fixed amount of work."""
    began = time.thread_time()
    total = 0
    for number in range(30_000):
        total += number * number
    return time.thread_time() - began


class CpuMeter:
    """Sum of the CPU seconds of this process and its descendants, including those of Ray and orphans.

    It is measured twice a second. The CPU time of a process after its last measurement is not counted.
    """

    def __init__(self) -> None:
        self._spent_s: dict[tuple[int, int], float] = {}
        self._samples_s = [sample_speed()]
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="cpu-meter", daemon=True).start()

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(SAMPLE_EVERY_S):
            self.total_s()
            self._samples_s.append(sample_speed())

    @property
    def slowness(self) -> float:
        """CPU seconds of this machine per CPU second of the reference, measured so far."""
        return sum(self._samples_s) / len(self._samples_s) / REFERENCE_S

    def total_s(self) -> float:
        """CPU seconds so far."""
        with self._lock:
            self._look()
            return sum(self._spent_s.values())

    def _look(self) -> None:
        processes = running_processes()
        # An orphan has no parent of this session. Every process that was once a descendant therefore counts as one.
        ours = {os.getpid()} | {p.pid for p in processes if (p.pid, p.started) in self._spent_s}
        size = 0
        while len(ours) > size:
            size = len(ours)
            ours |= {p.pid for p in processes if p.parent in ours}
        for process in processes:
            if process.pid in ours:
                self._spent_s[process.pid, process.started] = process.cpu_s


class CpuBudget:
    """Reports the CPU seconds of a session, and fails it above its budget."""

    def __init__(self, budget_s: float | None) -> None:
        self.budget_s = budget_s
        self.meter = CpuMeter()

    @property
    def spent_s(self) -> float:
        """Return the CPU seconds, converted to a core of reference speed."""
        return self.meter.total_s() / self.meter.slowness

    @property
    def fault(self) -> str:
        """Reason why the session fails, or "" if it does not."""
        if self.budget_s is None or self.spent_s <= self.budget_s:
            return ""
        return (
            f"this tier took {self.spent_s:.0f} CPU seconds, over its budget of {self.budget_s:g}; make its tests "
            "cheaper (pytest --durations=20 shows the slowest), or mark some full or nightly"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and self.fault:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        limit = "" if self.budget_s is None else f" of {self.budget_s:g}"
        measured = f"{self.meter.total_s():.0f} here, where a core has {1 / self.meter.slowness:.2f} of its speed"
        terminalreporter.write_line(f"CPU seconds of all processes: {self.spent_s:.0f}{limit} ({measured})")
        if self.fault:
            terminalreporter.section("over budget", red=True, bold=True)
            terminalreporter.write_line(self.fault, red=True)

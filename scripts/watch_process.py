"""Run a command and measure it from outside: the JSON rows that it appends to a file, CPU time, host and GPU memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from core.supervise.control import memory_bytes  # noqa: E402 (the project may not be installed)


def watched(
    command: list[str],
    rows_path: Path,
    log: Path,
    env: Mapping[str, str] | None = None,
    measure: Callable[[], dict[str, float]] = dict,
) -> list[dict[str, float]]:
    """Run a process and return the JSON rows that it wrote.

    Each row gets `cpu`, the CPU seconds used so far, and `host_bytes`, the peak host memory so far. Both include all
    descendants of the process.

    Args:
        command: the command.
        rows_path: file to which it appends one JSON object per step.
        log: file for its output.
        env: environment variables to set, in addition to those of this process.
        measure: returns further values of a row.
    """
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    rows: list[dict[str, float]] = []
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **offline, **(env or {})}, stdout=output, stderr=subprocess.STDOUT
        )
        memory = PeakMemory(process.pid)
        ended = False
        try:
            while not ended:
                ended = process.poll() is not None  # before the file is read, so that the last rows are not missed
                texts: list[str] = []
                if rows_path.is_file():
                    texts = rows_path.read_text(encoding="utf-8").splitlines(keepends=True)
                new = [json.loads(text) for text in texts[len(rows) :] if text.endswith("\n")]
                memory.sample()
                if new:  # only then, because reading /proc takes milliseconds from the measured processes
                    # At the end /proc no longer has the process; the last value is then the best one.
                    used = max([cpu_seconds(process.pid), *(row["cpu"] for row in rows[-1:])])
                    rows += [{**row, "cpu": used, "host_bytes": memory.peak, **measure()} for row in new]
                time.sleep(0.02)
        finally:
            process.kill()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text(encoding='utf-8')[-3000:]}")
    return rows


class PeakMemory:
    """Peak of the proportional set size of a process and its descendants, sampled at most five times per second."""

    SHARE = 0.01
    """Maximum share of the time that is spent on sampling."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._next = 0.0

    def sample(self) -> None:
        """Read the memory, unless the last sample is too recent."""
        began = time.monotonic()
        if began < self._next:
            return
        self.peak = max(self.peak, memory_bytes(self._pid))
        ended = time.monotonic()
        self._next = ended + max(0.2, (ended - began) / self.SHARE)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including those that have ended."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has just ended
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        ticks[int(stat.parent.name)] = sum(map(int, fields[11:15]))
    total = 0
    processes = [pid]
    while processes:
        process = processes.pop()
        total += ticks.get(process, 0)
        processes += parents.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def gpu_memory(log: Path) -> Iterator[list[int]]:
    """Yield a list that afterwards has the used bytes of each GPU, twice per second. Empty without nvidia-smi.

    Args:
        log: file for the output of nvidia-smi.
    """
    samples: list[int] = []
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield samples
        return
    command = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=500"]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL) as tool_process:
        try:
            yield samples
        finally:
            tool_process.terminate()
    # The last line may be incomplete, and some GPUs report text instead of a number.
    samples += [int(text) * 2**20 for text in log.read_text().split() if text.isdigit()]

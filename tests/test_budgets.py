"""The budget of CPU seconds of tests/cpu_budget.py, tested with small suites in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_budget import REFERENCE_S, CpuBudget

ROOT = Path(__file__).parents[1]
SLEEPS = "import time\ndef test_sleeps():\n    time.sleep(3)\n"
BURN = "import time\nwhile time.process_time() < 8: pass\n"
BURNS = f"import subprocess, sys\ndef test_burns():\n    subprocess.run([sys.executable, '-c', {BURN!r}])\n"
ORPHAN = f"""
import subprocess, sys, threading

def test_orphan():
    # A process whose parent ends at once: nobody of this session waits for it, and a pipe tells when it is done.
    start = 'import subprocess, sys; subprocess.Popen([sys.executable, "-c", sys.argv[1]]); import time; time.sleep(2)'
    subprocess.run([sys.executable, '-c', start, {BURN!r}], stdout=subprocess.PIPE)
"""


def run_suite(folder: Path, text: str, budget_s: float, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests with a budget."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.cpu_budget"]
    command += [f"--cpu-budget={budget_s}", *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_a_suite_above_its_cpu_budget_fails_even_if_all_tests_pass(tmp_path: Path) -> None:
    result = run_suite(tmp_path, BURNS, 2.0)
    assert result.returncode == 1
    assert "over its budget of 2" in result.stdout
    assert "1 passed" in result.stdout.splitlines()[-1]


@pytest.mark.full
def test_cpu_time_of_xdist_workers_and_orphans_is_counted(tmp_path: Path) -> None:
    result = run_suite(tmp_path, ORPHAN, 2.0, "-n", "1")
    assert result.returncode == 1
    assert "over its budget of 2" in result.stdout


def test_waiting_does_not_count_as_cpu_time(tmp_path: Path) -> None:
    result = run_suite(tmp_path, SLEEPS, 2.9)
    assert result.returncode == 0, result.stdout
    assert " of 2.9" in result.stdout


def test_cpu_seconds_are_scaled_by_the_speed_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = CpuBudget(60.0)
    monkeypatch.setattr(budget.meter, "total_s", lambda: 100.0)
    budget.meter._samples_s = [2.5 * REFERENCE_S, 1.5 * REFERENCE_S]
    assert budget.spent_s == pytest.approx(50.0)
    assert budget.fault == ""
    budget.meter._samples_s = [REFERENCE_S]
    assert "100 CPU seconds, over its budget of 60" in budget.fault

"""A signal during the start of a run ends it with one line and the code of the signal, and leaves no process."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recipe_runs import ROOT

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def started(command: list[str], run_dir: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*command, f"run_dir={run_dir}"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TROUPE_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_imported(process: "subprocess.Popen[str]", library: str) -> bool:
    """True once the process has mapped a library. The libraries are imported in a fixed order."""
    return library in Path(f"/proc/{process.pid}/maps").read_text(errors="replace")


def handles(process: "subprocess.Popen[str]", number: signal.Signals) -> bool:
    """True once the process catches or blocks a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    masks = [int(mask, 16) for mask in re.findall(r"^Sig(?:Cgt|Blk):\t(\w+)$", status, re.MULTILINE)]
    return any(mask >> (number - 1) & 1 for mask in masks)


def children_of(process: "subprocess.Popen[str]") -> list[str]:
    """Return the process ids of the children that any thread of the process has started, because a thread
    starts Ray.
    """
    pids: list[str] = []
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread may end while its list is read
            pids += (thread / "children").read_text().split()
    return pids


@pytest.mark.parametrize("number", CODES)
def test_a_signal_during_the_imports_prints_one_line(number: signal.Signals, tmp_path: Path) -> None:
    process = started(
        [sys.executable, "-P", str(ROOT / "scripts/early_stop.py"), "recipes.grpo.main"], tmp_path / "run"
    )
    while not has_imported(process, "pydantic_core"):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (CODES[number], "", "grpo: stopped before the start\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", CODES)
def test_a_signal_to_run_sh_ends_it_without_a_traceback(number: signal.Signals, tmp_path: Path) -> None:
    for tenths in (0, 1, 3):
        process = started(["bash", str(ROOT / "recipes/sft/run.sh")], tmp_path / "run")
        # On a busy machine bash takes a while to set its two traps. The last one is that of SIGTERM.
        while not handles(process, signal.SIGTERM):
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(tenths / 10)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        # For some milliseconds, while the program replaces bash, the signal itself ends the process.
        ends = ((CODES[number], "sft: stopped before the start\n"), (-number, ""))
        assert (process.returncode, err) in ends
        assert out == ""


@pytest.mark.full
@pytest.mark.parametrize("lines", [1, 12])
def test_a_signal_while_ray_and_roles_start_leaves_no_process(lines: int, tmp_path: Path) -> None:
    process = started([sys.executable, "-P", "-m", "recipes.grpo.main"], tmp_path / "run")
    assert process.stdout is not None
    for _ in range(lines):  # a line of the plan, which is printed before Ray is started
        assert process.stdout.readline()
    while lines > 1 and len(children_of(process)) < 3:  # the report's program, Ray's GCS and its raylet
        assert process.poll() is None
        time.sleep(0.05)
    descendants = children_of(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (130, 143)  # the job has begun or is about to begin
    assert err.splitlines()[-1].startswith("grpo: stopped")
    deadline = time.monotonic() + 60
    while alive := [pid for pid in descendants if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)

"""Stages f and g of check_gpu.py with gloo: two processes of this machine, and two machines with their own networks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.two_machines import laboratory

ROOT = Path(__file__).resolve().parents[1]
CHECK_GPU = ROOT / "scripts" / "check_gpu.py"
LIMIT_S = 500
PORT = 29500


def rows(file: Path, stage: str) -> dict[str, dict[str, Any]]:
    """Return check -> row of a stage."""
    return {row["check"]: row for row in json.loads(file.read_text())[stage]["rows"]}


def check_rows(by_check: dict[str, dict[str, Any]], carriers: set[str]) -> None:
    """Check that all checks of a stage are there and have passed."""
    failed = [row for row in by_check.values() if row["verdict"] == "FAILED"]
    assert not failed
    assert {"process group", "all_reduce of 1 KB", "all_reduce of 64 MB", "a rank that is absent"} <= by_check.keys()
    assert by_check["FSDP over 2 ranks: first step"]["verdict"] == "ok"
    for carrier in carriers:
        assert by_check[f"weights by {carrier} to 2 engines"]["verdict"] == "ok"


@pytest.mark.nightly  # ten processes that import torch
def test_two_processes_pass_the_checks_for_two_gpus(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(CHECK_GPU), "--device", "cpu", "--stage", "f", "--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    by_check = rows(out, "f")
    check_rows(by_check, {"shared_memory", "ipc", "broadcast"})
    assert by_check["tensor parallel 2: first step"]["verdict"] == "ok"


@pytest.mark.nightly
@pytest.mark.namespaces
def test_two_machines_pass_the_checks_for_two_machines(tmp_path: Path) -> None:
    with laboratory(2, has_ray=False) as machines:
        running: list[subprocess.Popen[str]] = []
        for rank, machine in enumerate(machines.machines):
            group = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": machines.near.ip, "MASTER_PORT": str(PORT)}
            out = tmp_path / f"{rank}.json"
            words = [sys.executable, CHECK_GPU, "--device", "cpu", "--stage", "g", "--out", out]
            command = machine.within(words, machines.env | group)
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for process in running:
            output, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, output
    check_rows(rows(tmp_path / "0.json", "g"), {"shared_memory", "broadcast"})
    assert not [row for row in rows(tmp_path / "1.json", "g").values() if row["verdict"] == "FAILED"]

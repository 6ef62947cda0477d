"""Tests of check_gpu.py without a GPU and without the libraries that it does not require."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says

pytestmark = pytest.mark.full  # each process imports torch and transformers

ROOT = Path(__file__).resolve().parents[1]
# Python imports this file at the start of each process, after which these modules seem not to be installed.
WITHOUT = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec

def filtered(name, path=None, target=None):
    return None if name in {absent} else find_spec(name, path, target)

PathFinder.find_spec = staticmethod(filtered)
"""
HEAVY = ("ray", "vllm", "deepspeed", "omegaconf", "pydantic")


def check_gpu(folder: Path, *arguments: str, absent: tuple[str, ...] = HEAVY) -> subprocess.CompletedProcess[str]:
    """Run the script as if these modules were not installed."""
    (folder / "sitecustomize.py").write_text(WITHOUT.format(absent=set(absent)))
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), *arguments]
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)


def rows(folder: Path, stage: str) -> dict[str, dict[str, Any]]:
    """Return check -> row of a stage."""
    results = json.loads((folder / "gpu.json").read_text())[stage]
    return {row["check"]: row for row in results["rows"]}


@pytest.mark.nightly
def test_all_cpu_checks_pass_without_ray_vllm_deepspeed_omegaconf_and_pydantic(tmp_path: Path) -> None:
    done = check_gpu(tmp_path, "--device", "cpu", "--stage", "a", "b", "--out", "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [row["verdict"] for row in rows(tmp_path, "a").values()]
    assert set(verdicts) == {"ok", "measured"}
    # Rows: 3 precisions of training with 2 each, 2 kinds of packing with 5 each, 2 of rounding, 2 x 2 temperatures x 2
    # of agreement, the vocabulary, 2 kinds of sleep with 2 each, and 2 models with 2 lengths.
    assert verdicts.count("ok") == 6 + 10 + 2 + 8 + 1 + 4 + 4
    # Rows: the machine and its 2 models, 2 kernels, the vocabulary, 2 optimizers, generation, 2 of calls that wait,
    # and 2 lengths and the loss of grpo with and without checkpointing.
    assert verdicts.count("measured") == 3 + 2 + 1 + 2 + 1 + 2 + 4 + 2
    carriers = [row for name, row in rows(tmp_path, "b").items() if name.startswith("weights by ")]
    assert [row["verdict"] for row in carriers] == ["ok"] * 5
    assert len({row["measured"].partition(" bytes")[0] for row in carriers}) == 1
    page = runpy.run_path(str(ROOT / "scripts" / "gpu_page.py"))["with_results"]
    stages = json.loads((tmp_path / "gpu.json").read_text())
    before = (ROOT / "docs" / "gpu.md").read_text()
    written = page(before, stages)
    assert "**Stage b**" in written and "| weights by TCP |" in written
    assert page(written, stages) == written
    assert written.partition("## Results")[0] == before.partition("## Results")[0]
    assert written.endswith(before.partition("## Never run")[2])


@pytest.mark.nightly  # two runs on Ray, and vLLM
@pytest.mark.vllm
def test_stage_e_has_the_timers_of_two_runs_their_warnings_and_logs_and_each_experiment(tmp_path: Path) -> None:
    done = check_gpu(tmp_path, "--device", "cpu", "--stage", "e", "--out", "gpu.json", absent=())
    assert done.returncode == 0, done.stdout + done.stderr
    results = rows(tmp_path, "e")
    for run in ("grpo, vllm that sleeps, verified", "grpo, vllm that sleeps, not verified"):
        assert results[run]["verdict"] == "ok"
        assert isinstance(results[run]["warnings"], dict)
        assert re.search(r"sync \d.*, at most \d", results[f"{run}: seconds per step"]["measured"])
        assert results[f"{run}: fallback"]["measured"].startswith("0 warnings")
        archive = tmp_path / "gpu.logs" / "e" / f"{run.replace(', ', '-').replace(' ', '_')}.tar.gz"
        assert archive.stat().st_size > 1000
    assert len([name for name in results if name.startswith("digests on the host")]) == 4
    assert "receive" in results["vLLM without a trainer, 3 rounds"]["measured"]
    assert any("bytes in shared memory" in name for name in results)


def test_a_failed_check_is_a_row_with_its_error_and_the_other_checks_run(tmp_path: Path) -> None:
    missing = "plugins.fast_decode.cache"
    only = ["--stage", "a", "--only", "generation", "--out", "gpu.json"]
    (tmp_path / "gpu.json").write_text('{"b": {"rows": []}}')
    done = check_gpu(tmp_path, "--device", "cpu", *only, absent=(*HEAVY, missing))
    assert done.returncode == 1, done.stdout + done.stderr
    checks = rows(tmp_path, "a")
    assert checks["generation"]["verdict"] == "FAILED"
    assert checks["generation"]["measured"] == f"ModuleNotFoundError: No module named '{missing}'"
    assert checks["machine"]["verdict"] == "measured"
    assert rows(tmp_path, "b") == {}  # result of an earlier run


def test_without_a_gpu_the_script_reports_it_and_ends_with_2(tmp_path: Path) -> None:
    done = check_gpu(tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(says("no GPU", "--device cpu"), done.stdout)

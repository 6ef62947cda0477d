"""check_gpu.py where there is no GPU and none of the libraries that it must do without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.messages import says

pytestmark = pytest.mark.full  # each process imports torch and transformers

ROOT = Path(__file__).resolve().parents[1]
# Python reads it at the start of each process: these modules are then as if they were not installed.
WITHOUT = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec

def filtered(name, path=None, target=None):
    return None if name in {absent} else find_spec(name, path, target)

PathFinder.find_spec = staticmethod(filtered)
"""
HEAVY = ("ray", "vllm", "deepspeed", "omegaconf", "pydantic")


def check_gpu(folder: Path, *arguments: str, absent: tuple[str, ...] = HEAVY) -> subprocess.CompletedProcess[str]:
    """Run the script where modules of these names cannot be found."""
    (folder / "sitecustomize.py").write_text(WITHOUT.format(absent=set(absent)))
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), *arguments]
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)


def verdicts(table: str) -> dict[str, str]:
    """The last column, by the first."""
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: row[-1] for row in cells[1:]}


def test_all_that_a_cpu_can_run_passes_without_ray_vllm_deepspeed_omegaconf_and_pydantic(tmp_path: Path) -> None:
    done = check_gpu(tmp_path, "--device", "cpu", "--out", "gpu.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gpu.md").read_text() == done.stdout
    found = verdicts(done.stdout)
    assert "not run" not in found.values()
    # 3 precisions of training with 2 rows, 2 of packing with 3, 2 of rounding, 2 x 2 temperatures x 2 of agreement.
    assert list(found.values()).count("ok") == 6 + 6 + 2 + 8
    # The machine and its 2 models, 2 kernels, generation, and 2 lengths with and without checkpointing.
    assert list(found.values()).count("measured") == 3 + 2 + 1 + 4
    assert done.stdout.endswith("\n22 ok, 0 FAILED, 10 measured, 0 not run.\n")


def test_a_check_that_fails_is_a_row_with_its_error_and_the_others_go_on(tmp_path: Path) -> None:
    missing = "components.engines.decode_cache"
    done = check_gpu(tmp_path, "--device", "cpu", "--only", "generation", "machine", absent=(*HEAVY, missing))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"| generation | ModuleNotFoundError: No module named '{missing}' |  | FAILED |" in done.stdout
    assert "measured" in verdicts(done.stdout).values()


def test_without_a_gpu_it_says_so_and_ends_with_2(tmp_path: Path) -> None:
    done = check_gpu(tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(says("no GPU", "--device cpu"), done.stdout)

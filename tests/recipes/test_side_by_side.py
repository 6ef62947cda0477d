"""Concurrent runs, and runs on a shared cluster, do not affect each other."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import GUARD_S, ROOT, Run, RunFolder

OPTIONS = """
    data.path=task:sort prompts_per_step=4 samples_per_prompt=4 train.mini_batch_size=16 max_steps=6
    rollout.max_new_tokens=8 algorithm.kl_coef=0.1 checkpoint.every=2 train.learning_rate=1e-3
"""


def started(run_dir: Path, policy: Path) -> subprocess.Popen[str]:
    """A run with its own Ray cluster."""
    command = [
        sys.executable,
        "-m",
        "recipes.grpo.main",
        f"run_dir={run_dir}",
        f"model.path={policy}",
        *OPTIONS.split(),
    ]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("troupe*")}


@pytest.mark.nightly
def test_concurrent_runs_give_the_results_of_separate_runs(policy: Path, tmp_path: Path) -> None:
    before = in_shared_memory()
    folders = [tmp_path / "one", tmp_path / "other"]
    for process in [started(folder, policy) for folder in folders]:
        _, errors = process.communicate(timeout=GUARD_S)
        assert process.returncode == 0, errors
    one, other = (RunFolder(folder) for folder in folders)
    assert one.learnt() == other.learnt()
    assert in_shared_memory() <= before


@pytest.mark.nightly
def test_the_end_of_one_run_does_not_affect_another(policy: Path, tmp_path: Path) -> None:
    first = started(tmp_path / "first", policy)
    second = started(tmp_path / "second", policy)
    while not RunFolder(tmp_path / "first").metrics:
        assert first.poll() is None, first.communicate()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    third = started(tmp_path / "third", policy)  # removes the remains of the first run
    for process in (second, third):
        _, errors = process.communicate(timeout=GUARD_S)
        assert process.returncode == 0, errors
    assert RunFolder(tmp_path / "second").learnt() == RunFolder(tmp_path / "third").learnt()


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["well", "killed"])
def test_on_a_shared_cluster_the_actors_of_other_users_are_untouched(
    end: str, ray_address: str, policy: Path, tmp_path: Path
) -> None:
    import ray
    from ray.util import placement_group

    class Theirs:
        def __init__(self) -> None:
            self.count = 0

        def add(self) -> int:
            self.count += 1
            return self.count

    group = placement_group([{"CPU": 1}], name="theirs")
    assert group.wait(60)
    remote: Any = ray.remote(num_cpus=1)(Theirs)
    actor: Any = remote.options(name="theirs", lifetime="detached").remote()
    kept = ray.put(list(range(1000)))
    shared = Path("/dev/shm/somebody-else")
    shared.write_text("theirs")
    try:
        assert ray.get(actor.add.remote()) == 1
        run = Run("grpo", ray_address, tmp_path / "run", f"model.path={policy}", *OPTIONS.split())
        if end == "well":
            assert run.wait().code == 0, run.err
        else:
            run.wait_until(lambda: run.metrics)
            run.kill()
        assert ray.get(actor.add.remote()) == 2
        assert ray.get(kept) == list(range(1000))
        assert ray.util.placement_group_table(group)["state"] == "CREATED"
        assert shared.read_text() == "theirs"
    finally:
        shared.unlink()
        ray.kill(actor)
        ray.util.remove_placement_group(group)

"""Nothing is lost: a run that was killed, whenever it was, ends with the weights and metrics of one that was not."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import Run, running

from tests.processes import wait_until_gone

STEPS = {"openrlhf_ppo": 8, "sft": 64}
SAVE_STEPS = {"openrlhf_ppo": 2, "sft": 16}
SECRET = "0123456789abcdef0123456789abcdef01234567"
OPTIONS = {
    "openrlhf_ppo": "prompt_data=task:sort scorer=sort eval_dataset=task:sort max_eval_samples=64 eval_steps=3 "
    "max_samples=128 rollout_batch_size=16 n_samples_per_prompt=4 train_batch_size=32 use_dynamic_batch=true "
    "generate_max_len=8 actor_learning_rate=3e-4 critic_learning_rate=1e-3 lr_warmup_ratio=0.1 init_kl_coef=0 "
    "save_value_network=true",
    "sft": "pretrain=new:sort dataset=task:sort max_samples=2112 eval_samples=64 train_batch_size=32 "
    "learning_rate=2e-3 zero_stage=1",
}

Start = Callable[..., Run]


@pytest.fixture(scope="module", params=["openrlhf_ppo", "sft"])
def recipe(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def start(recipe: str, ray_address: str, policy: Path) -> Start:
    """Starts the recipe in a folder."""
    options = [*OPTIONS[recipe].split(), f"save_steps={SAVE_STEPS[recipe]}"]
    options += [f"pretrain={policy}"] if recipe == "openrlhf_ppo" else []
    return lambda folder, *more, **env: Run(recipe, ray_address, folder, *options, *more, env=env)


@pytest.fixture(scope="module")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = start(tmp_path_factory.mktemp("undisturbed") / "run").wait()
    assert run.code == 0, run.err
    return run


def exact(run: Run) -> dict[str, Any]:
    """Everything that a run has learnt and measured, but for times."""
    weights = {name: tensor.numpy().tobytes() for name, tensor in run.weights().items()}
    assert {name.partition("/")[0] for name in weights} - {"critic"} == {"hf", "state"}
    assert any("critic" in name for name in weights) == ("openrlhf" in run.summary["recipe"])
    return {"metrics": run.learnt(), "weights": weights}


def same(one: Run, other: Run) -> None:
    """Bit by bit."""
    a, b = exact(one), exact(other)
    assert a["metrics"] == b["metrics"]
    assert a["weights"].keys() == b["weights"].keys()
    assert [name for name in a["weights"] if a["weights"][name] != b["weights"][name]] == []


def has_step(run: Run, step: int, since: float) -> bool:
    """Whether this step, or a later one, was written down after a moment (an earlier start has left its lines)."""
    lines = run.metrics  # read once: a start that begins anew empties the file
    return bool(lines) and lines[-1]["step"] >= step and lines[-1]["time"] > since


@pytest.mark.timeout(400)
def test_killed_replaced_started_again_and_stopped_a_run_ends_as_if_nothing_had_happened(
    recipe: str, start: Start, undisturbed: Run, tmp_path: Path
) -> None:
    folder, steps, saved = tmp_path / "run", STEPS[recipe], SAVE_STEPS[recipe]
    half = folder / "checkpoints" / f".step_{saved}.partial"

    # kill -9 of the driver between the first and the last file of a checkpoint: everything else ends with it.
    run = start(folder)
    run.wait_until(lambda: any(half.glob("*/*")), pause=0.001)
    run.process.kill()
    pids = [*run.pids().values(), *running("reward_workers", run.pids().get("reward-0"))]
    assert len(pids) == (6 if recipe == "openrlhf_ppo" else 2)
    run.process.wait(10)
    wait_until_gone(*pids)
    assert half.is_dir()
    assert not (folder / "checkpoints" / "latest").exists()

    # Instances are replaced while it runs.
    began = time.time()
    secrets = {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline"} if recipe == "sft" else {}
    run = start(folder, *(["use_wandb=true", "use_tensorboard=true"] if secrets else []), **secrets)
    run.wait_until(lambda: has_step(run, 1, began))
    assert not half.exists()
    if recipe == "openrlhf_ppo":
        for instance in ("rollout-0", "reward-0"):
            os.kill(run.pids()[instance], signal.SIGKILL)
        run.wait_until(lambda: len(run.starts()["rollout-0"]) == 3)
    # kill -9 of a rank in the middle of a step: all starts again from the last checkpoint.
    run.wait_until((folder / "checkpoints" / f"step_{saved}").is_dir, pause=0.01)
    run.wait_until(lambda: has_step(run, saved + 1, began), pause=0.01)
    os.kill(run.pids()["actor-0"], signal.SIGKILL)
    killed = time.time()
    # Ctrl-C: the step at hand is finished, and kept.
    run.wait_until(lambda: has_step(run, saved + 1, killed + 0.5), pause=0.01)
    run.process.send_signal(signal.SIGINT)
    run.wait(60)
    assert (run.code, run.summary["status"], run.summary["attempts"]) == (130, "stopped", 2)
    assert saved <= run.summary["resumed_from"] < steps
    assert "all starts again, attempt 2 of 4" in run.out
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    happened = [event["kind"] for event in events if event["event"] == "job"]
    lost = ["lost", "lost", "replaced", "replaced"] if recipe == "openrlhf_ppo" else []
    assert sorted(happened) == sorted(["start", "start", *lost, "restart", "start", "stop", "end"])
    stopped_at = run.summary["steps"]
    assert f"stopped after step {stopped_at} of {steps}; run_dir={folder} goes on\n" in run.out
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{stopped_at}\n"
    assert stopped_at < steps
    assert run.left_behind() == []

    run = start(folder).wait()
    assert run.code == 0, run.err
    assert f"goes on after step {stopped_at} of {steps}" in run.out
    summary = run.summary
    assert (summary["steps"], summary["resumed_from"], summary["attempts"]) == (steps, stopped_at, 1)
    assert summary["score"] == undisturbed.summary["score"]
    same(run, undisturbed)
    if secrets:
        # Both attempts are one run on W&B, and the key is in no file.
        parts = list((folder / "wandb").glob("offline-run-*"))
        assert (len(parts), len({part.name.rpartition("-")[2] for part in parts})) == (2, 1)
        assert list((folder / "tensorboard").glob("events.*"))
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


@pytest.mark.timeout(200)
@pytest.mark.parametrize("recipe", ["sft"], indirect=True)
def test_a_finished_run_is_not_done_again(start: Start, undisturbed: Run) -> None:
    before = exact(undisturbed)
    again = start(undisturbed.run_dir).wait()
    assert again.code == 0, again.err
    assert "goes on after step 64 of 64" in again.out
    assert exact(again) == before
    assert again.summary["status"] == "finished"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("recipe", ["sft"], indirect=True)
def test_without_restarts_a_killed_process_ends_the_run_which_says_why_and_leaves_nothing(
    start: Start, tmp_path: Path
) -> None:
    run = start(tmp_path / "run", "max_restarts=0", "max_samples=10000")
    run.wait_until(lambda: run.metrics)
    pid = run.pids()["actor-0"]
    os.kill(pid, signal.SIGKILL)
    run.wait(60)
    assert (run.code, run.summary["status"]) == (1, "failed")
    *output, line = run.err.splitlines()
    assert f": failed: ACTOR-0 (process {pid} on " in line
    assert any(f"ACTOR-0: process {pid} on " in line for line in output)  # the last lines of its log
    assert "ACTOR-0" in run.summary["error"]
    assert run.left_behind() == []


def test_what_cannot_be_resumed_is_refused_before_anything_starts(
    recipe: str, undisturbed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib

    main = importlib.import_module(f"recipes.{recipe}.main").main
    for options, message in (
        (["resume=none", f"run_dir={undisturbed.run_dir}"], "holds a run already"),
        (
            ["resume=none", f"run_dir={tmp_path}/a", f"ckpt_path={undisturbed.run_dir}/checkpoints"],
            f"up to step_{STEPS[recipe]}",
        ),
        ([f"resume={tmp_path}/nothing", f"run_dir={tmp_path}/b"], "nothing"),
    ):
        assert main(options) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

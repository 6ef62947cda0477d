"""Nothing is lost: a run that was killed, whenever it was, ends with the weights and metrics of one that was not."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import Run, is_alive, running
from safetensors.torch import load_file

STEPS = 6
SECRET = "0123456789abcdef0123456789abcdef01234567"
OPTIONS = {
    "openrlhf_ppo": "prompt_data=task:sort scorer=sort eval_dataset=task:sort max_eval_samples=64 eval_steps=3 "
    "max_samples=96 rollout_batch_size=16 n_samples_per_prompt=4 train_batch_size=32 use_dynamic_batch=true "
    "generate_max_len=8 actor_learning_rate=3e-4 critic_learning_rate=1e-3 lr_warmup_ratio=0.1 init_kl_coef=0 "
    "save_value_network=true",
    "sft": "pretrain=new:sort dataset=task:sort max_samples=256 eval_samples=64 train_batch_size=32 "
    "learning_rate=2e-3 zero_stage=1 num_gpus_per_node=2",
}

Start = Callable[..., Run]


@pytest.fixture(scope="module", params=["openrlhf_ppo", "sft"])
def recipe(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def start(recipe: str, ray_address: str, policy: Path) -> Start:
    """Starts the recipe in a folder: six steps, a checkpoint after every second one."""
    options = [*OPTIONS[recipe].split(), "save_steps=2"]
    options += [f"pretrain={policy}"] if recipe == "openrlhf_ppo" else []
    return lambda folder, *more, **env: Run(recipe, ray_address, folder, *options, *more, env=env)


@pytest.fixture(scope="module")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = start(tmp_path_factory.mktemp("undisturbed") / "run").wait()
    assert run.code == 0, run.err
    return run


def exact(run: Run) -> dict[str, Any]:
    """Everything that a run has learnt and measured, but for times."""
    timed = ("time", "timing_s", "perf", "checkpoint")
    metrics = [{name: v for name, v in entry.items() if not name.startswith(timed)} for entry in run.metrics]
    folder = run.run_dir / "checkpoints" / f"step_{STEPS}"
    files = sorted(file for file in folder.rglob("*.safetensors"))
    assert len(files) >= 3 if "openrlhf" in run.summary["recipe"] else len(files) >= 2
    weights = {
        f"{file.relative_to(folder)}:{name}": tensor.numpy().tobytes()
        for file in files
        for name, tensor in load_file(file).items()
    }
    return {"metrics": metrics, "weights": weights}


def same(one: Run, other: Run) -> None:
    """Bit by bit."""
    a, b = exact(one), exact(other)
    assert a["metrics"] == b["metrics"]
    assert a["weights"].keys() == b["weights"].keys()
    assert [name for name in a["weights"] if a["weights"][name] != b["weights"][name]] == []


def latest(folder: Path) -> int:
    """The step of the checkpoint that a resume would take."""
    return int((folder / "checkpoints" / "latest").read_text().removeprefix("step_"))


@pytest.mark.timeout(400)
def test_killed_while_a_checkpoint_is_written_and_stopped_by_ctrl_c_it_ends_as_if_it_had_not_been(
    recipe: str, start: Start, undisturbed: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    half = folder / "checkpoints" / ".step_2.partial"

    # kill -9 of the driver between the first and the last file of a checkpoint: everything else ends with it.
    run = start(folder)
    run.wait_until(lambda: any(half.glob("*/*")), pause=0.001)
    run.process.kill()
    pids = [*run.pids().values(), *running("reward_workers", run.pids().get("reward-0"))]
    assert len(pids) == (6 if recipe == "openrlhf_ppo" else 3)
    run.process.wait(10)
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
    assert half.is_dir()
    assert not (folder / "checkpoints" / "latest").exists()

    # Ctrl-C: the step at hand is finished, and kept.
    began = time.time()
    run = start(folder, "save_steps=-1")
    run.wait_until(lambda: run.metrics and run.metrics[-1]["step"] >= 1 and run.metrics[-1]["time"] > began)
    run.process.send_signal(signal.SIGINT)
    run.wait(60)
    assert (run.code, run.summary["status"]) == (130, "stopped")
    stopped_at = run.summary["steps"]
    assert f"stopped after step {stopped_at} of {STEPS}; run_dir={folder} goes on\n" in run.out
    assert latest(folder) == stopped_at < STEPS
    assert not half.exists()
    assert run.left_behind() == []

    run = start(folder).wait()
    assert run.code == 0, run.err
    assert f"goes on after step {stopped_at} of {STEPS}" in run.out
    summary = run.summary
    assert (summary["steps"], summary["resumed_from"], summary["attempts"]) == (STEPS, stopped_at, 1)
    assert summary["score"] == undisturbed.summary["score"]
    same(run, undisturbed)


@pytest.mark.timeout(400)
def test_processes_that_die_while_it_runs_are_replaced_or_all_starts_again_and_nothing_is_lost(
    recipe: str, start: Start, undisturbed: Run, tmp_path: Path
) -> None:
    wandb = {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline"} if recipe == "sft" else {}
    run = start(tmp_path / "run", *(["use_wandb=true", "use_tensorboard=true"] if wandb else []), **wandb)
    if recipe == "openrlhf_ppo":
        run.wait_for_step(1)
        for instance in ("rollout-0", "reward-0"):
            os.kill(run.pids()[instance], signal.SIGKILL)
        run.wait_until(lambda: len(run.starts()["rollout-0"]) == 2)
    run.wait_until(lambda: (run.run_dir / "checkpoints" / "step_2").is_dir() and run.metrics[-1]["step"] >= 3)
    os.kill(run.pids()["actor-0"], signal.SIGKILL)
    run.wait()
    assert run.code == 0, run.err
    assert run.summary["attempts"] == 2
    assert run.summary["resumed_from"] in (2, 3)
    assert "all starts again, attempt 2 of 4" in run.out
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    happened = [event["kind"] for event in events if event["event"] == "job"]
    lost = ["lost", "lost", "replaced", "replaced"] if recipe == "openrlhf_ppo" else []
    assert sorted(happened) == sorted(["start", *lost, "restart", "start", "end"])
    assert run.left_behind() == []
    same(run, undisturbed)
    if wandb:
        # Both attempts are one run there, and the key is in no file.
        parts = list((run.run_dir / "wandb").glob("offline-run-*"))
        assert (len(parts), len({part.name.rpartition("-")[2] for part in parts})) == (2, 1)
        assert list((run.run_dir / "tensorboard").glob("events.*"))
        files = [file for file in run.run_dir.rglob("*") if file.is_file()]
        assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


@pytest.mark.timeout(200)
@pytest.mark.parametrize("recipe", ["sft"], indirect=True)
def test_a_finished_run_is_not_done_again(start: Start, undisturbed: Run) -> None:
    before = exact(undisturbed)
    again = start(undisturbed.run_dir).wait()
    assert again.code == 0, again.err
    assert f"goes on after step {STEPS} of {STEPS}" in again.out
    assert exact(again) == before
    assert again.summary["status"] == "finished"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("recipe", ["sft"], indirect=True)
def test_without_restarts_a_killed_process_ends_the_run_which_says_why_and_leaves_nothing(
    start: Start, tmp_path: Path
) -> None:
    run = start(tmp_path / "run", "max_restarts=0", "max_samples=100000")
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
        (["resume=none", f"run_dir={tmp_path}/a", f"ckpt_path={undisturbed.run_dir}/checkpoints"], "up to step_6"),
        ([f"resume={tmp_path}/nothing", f"run_dir={tmp_path}/b"], "nothing"),
    ):
        assert main(options) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

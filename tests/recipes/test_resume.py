"""Nothing is lost: a run that was killed, whenever it was, ends with the weights and metrics of one that was not."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import Run
from safetensors.torch import load_file

STEPS = 6
OPTIONS = {
    "openrlhf_ppo": "prompt_data=task:sort scorer=sort eval_dataset=task:sort max_eval_samples=64 eval_steps=3 "
    "max_samples=96 rollout_batch_size=16 n_samples_per_prompt=4 train_batch_size=32 use_dynamic_batch=true "
    "generate_max_len=8 actor_learning_rate=3e-4 critic_learning_rate=1e-3 lr_warmup_ratio=0.1 init_kl_coef=0.01 "
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
    return lambda folder, *more: Run(recipe, ray_address, folder, *options, *more)


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


def kill_all(run: Run) -> None:
    """The driver, and at the same moment everything it has started."""
    for pid in (run.process.pid, *run.pids().values()):
        os.kill(pid, signal.SIGKILL)
    run.process.wait(10)


def test_killed_while_a_checkpoint_is_written_and_in_the_middle_of_a_step_it_ends_as_if_it_had_not_been(
    start: Start, undisturbed: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    half = folder / "checkpoints" / ".step_4.partial"

    run = start(folder)
    run.wait_until(lambda: any(half.glob("*/*")), pause=0.001)
    kill_all(run)
    assert half.is_dir()
    # The best policy is kept too, and step 3 is evaluated.
    assert (folder / "checkpoints" / "latest").read_text() in ("step_2\n", "step_3\n")

    run = start(folder)
    run.wait_until((folder / "checkpoints" / "step_4").is_dir)  # steps 3 and 4 are done again
    run.wait_until(lambda: run.metrics[-1]["step"] == 5)
    kill_all(run)
    assert (folder / "checkpoints" / "latest").read_text() == "step_4\n"
    assert not half.exists()

    run = start(folder).wait()
    assert run.code == 0, run.err
    assert f"goes on after step 4 of {STEPS}" in run.out
    assert (run.summary["steps"], run.summary["resumed_from"], run.summary["attempts"]) == (STEPS, 4, 1)
    assert run.summary["score"] == undisturbed.summary["score"]
    same(run, undisturbed)


def test_ctrl_c_writes_a_checkpoint_and_the_same_command_goes_on_from_there(
    start: Start, undisturbed: Run, tmp_path: Path
) -> None:
    run = start(tmp_path / "run", "save_steps=-1")
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGINT)
    run.wait(60)
    assert run.code == 130
    assert run.summary["status"] == "stopped"
    assert "stopped after step " in run.out
    assert run.left_behind() == []
    steps = run.summary["steps"]
    assert (run.run_dir / "checkpoints" / "latest").read_text() == f"step_{steps}\n"
    again = start(tmp_path / "run", "save_steps=-1").wait()
    assert again.summary["resumed_from"] == steps
    same(again, undisturbed)


def test_a_finished_run_is_not_done_again(start: Start, undisturbed: Run) -> None:
    before = exact(undisturbed)
    again = start(undisturbed.run_dir).wait()
    assert again.code == 0, again.err
    assert f"goes on after step {STEPS} of {STEPS}" in again.out
    assert exact(again) == before
    assert again.summary["status"] == "finished"


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

"""A run whose processes were killed, any of them, ends with the weights and metrics of an undisturbed run."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from gates import Gate, source
from local_runs import run_here, run_locally
from recipe_runs import Run

from tests.messages import says

STEPS, SAVE_STEPS = 8, 2
SECRET = "0123456789abcdef0123456789abcdef01234567"
PPO = f"""prompt_data=task:sort eval_dataset=task:sort reward.heldout_source=sort evaluation.max_samples=32 eval_steps=3
    max_samples=64 rollout_batch_size=8 n_samples_per_prompt=4 train_batch_size=16 generate_max_len=8
    actor_learning_rate=3e-4 critic_learning_rate=1e-3 lr_warmup_ratio=0.1 init_kl_coef=0 save_value_network=true
    save_steps={SAVE_STEPS} reward.timeout_s=600"""
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    while is_shut():
        time.sleep(0.01)
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return {"rewards": [sum(a == b for a, b in zip(response, label)) / 5 for response, label in zip(responses, labels)]}
"""
SFT = [
    *("model.path=new:sort", "data.path=task:sort", "evaluation.held_out=32"),
    *("train.batch_size=32", "train.zero_stage=1"),
]


@pytest.mark.full
def test_a_run_that_was_killed_stopped_and_resumed_equals_an_undisturbed_run(
    ray_address: str, policy: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    saved = Gate(folder / f"checkpoints/step_{SAVE_STEPS}", tmp_path / "first")
    later = Gate(folder / "rollouts/step_000005.parquet", tmp_path / "second")
    (tmp_path / "reward.py").write_text(source(saved, later) + REWARD)
    options = [*PPO.split(), f"pretrain={policy}", f"remote_rm_url={tmp_path}/reward.py"]
    kept = {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline"}
    run = Run("openrlhf_ppo", ray_address, folder, *options, "use_wandb=true", "use_tensorboard=true", env=kept)

    # Within a step two instances are killed and replaced. One of them is working.
    run.wait_until(saved.is_reached)
    for instance in ("rollout-0", "reward-0"):
        os.kill(run.pids()[instance], signal.SIGKILL)
    run.wait_until(lambda: happened(folder).count("replaced") == 2)
    # A rank is killed: the job restarts from the last checkpoint.
    os.kill(run.pids()["actor-0"], signal.SIGKILL)
    run.wait_until(lambda: "restart" in happened(folder))
    saved.open()
    # Ctrl-C: the current step is finished and saved.
    run.wait_until(later.is_reached)
    run.process.send_signal(signal.SIGINT)
    run.wait_until(lambda: "stop" in happened(folder))
    later.open()
    run.wait()
    assert (run.code, run.summary["status"], run.summary["attempts"]) == (130, "stopped", 2)
    assert run.summary["resumed_from"] == SAVE_STEPS
    kinds = ["start", "lost", "lost", "replaced", "replaced", "restart", "start", "stop", "end"]
    assert sorted(happened(folder)) == sorted(kinds)
    stopped_at = run.summary["steps"]
    assert 5 <= stopped_at < STEPS
    assert re.search(says(f"step {stopped_at} of {STEPS}", f"run_dir={folder}"), run.out)
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{stopped_at}\n"
    assert run.left_behind() == []

    # The state of a checkpoint after kill -9 of the driver between its first and its last file.
    half = folder / "checkpoints" / f".step_{stopped_at + 1}.partial"
    shutil.copytree(folder / "checkpoints" / f"step_{stopped_at}" / "hf", half / "hf")
    run = Run("openrlhf_ppo", ray_address, folder, *options).wait()
    assert run.code == 0, run.err
    assert re.search(says(f"step {stopped_at} of {STEPS}"), run.out)
    assert not half.exists()
    summary = run.summary
    assert (summary["steps"], summary["resumed_from"], summary["attempts"]) == (STEPS, stopped_at, 1)
    # In one process with all gates open.
    undisturbed = run_locally("openrlhf_ppo", tmp_path, {"undisturbed": options})["undisturbed"]
    assert summary["score"] == undisturbed.summary["score"]
    assert run.learnt() == undisturbed.learnt()
    ours, theirs = run.weights(), undisturbed.weights()
    assert {name.partition("/")[0] for name in ours} == {"hf", "state", "critic"}
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not tensor.equal(theirs[name])] == []
    # Both attempts are one run on W&B, and the key is not in any file.
    parts = list((folder / "wandb").glob("offline-run-*"))
    assert (len(parts), len({part.name.rpartition("-")[2] for part in parts})) == (2, 1)
    assert list((folder / "tensorboard").glob("events.*"))
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


def happened(folder: Path) -> list[str]:
    """Return the events of the job from its event log."""
    text = (folder / "events.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [event["kind"] for event in events if event["event"] == "job"]


@pytest.mark.full
def test_without_restarts_a_killed_process_ends_the_run_with_the_reason_and_no_leftovers(
    ray_address: str, tmp_path: Path
) -> None:
    endless = ["data.max_samples=1000", "train.epochs=100000"]
    run = Run("sft", ray_address, tmp_path / "run", *SFT, *endless, "max_restarts=0")
    run.wait_until(lambda: run.metrics)
    pid = run.pids()["actor-0"]
    os.kill(pid, signal.SIGKILL)
    run.wait()
    assert (run.code, run.summary["status"]) == (1, "failed")
    *output, line = run.err.splitlines()
    assert re.search(says("sft", "ACTOR-0", pid), line)
    assert any(re.search(says("ACTOR-0", pid), line) for line in output)  # the last lines of its log
    assert "ACTOR-0" in run.summary["error"]
    assert run.left_behind() == []


def test_an_invalid_resume_is_rejected_before_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from recipes.sft.main import main

    assert run_here("sft", tmp_path / "run", *SFT, "data.max_samples=96").code == 0
    for options, facts in (
        (["resume=none", f"run_dir={tmp_path}/run"], ["resume", f"{tmp_path}/run"]),
        (["resume=none", f"run_dir={tmp_path}/a", f"checkpoint.path={tmp_path}/run/checkpoints"], ["resume", "step_2"]),
        ([f"resume={tmp_path}/nothing", f"run_dir={tmp_path}/b"], [f"{tmp_path}/nothing"]),
    ):
        assert main(options) == 2
        error = capsys.readouterr().err
        assert re.search(says(*facts), error)
        assert error.count("\n") == 1

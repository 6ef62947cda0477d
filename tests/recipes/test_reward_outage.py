"""A reward server that dies or hangs in the middle of a run: the run ends, and nothing is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
from outage import Server, held_port, meet
from recipe_runs import Run, RunFolder

from components.batch import Batch

PPO = """prompt_data=task:sort max_samples=48 rollout_batch_size=8 n_samples_per_prompt=4 train_batch_size=16
    use_dynamic_batch=true generate_max_len=8 actor_learning_rate=3e-4 critic_learning_rate=1e-3 save_steps=-1
    remote_rm_timeout=4"""
JUDGED = """eval_dataset=task:sort eval_scorer=sort eval_steps=2 max_eval_samples=32 eval_n_samples_per_prompt=1
    best_eval_metric_key=none"""
GRPO = """data.path=task:sort data.max_rows=32 prompts_per_step=8 samples_per_prompt=4 minibatches=2
    rollout.max_new_tokens=8 train.learning_rate=3e-4 checkpoint.every=-1"""


def same_end(folder: Path) -> None:
    """Both runs end with the same metrics and weights, bit by bit."""
    one, other = RunFolder(folder / "undisturbed"), RunFolder(folder / "disturbed")
    assert one.learnt() == other.learnt()
    a, b = ({name: x.numpy().tobytes() for name, x in run.weights().items()} for run in (one, other))
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []


def checked_failure(start: tuple[int, str], reason: str) -> None:
    """Exit code 1, and one line that says of which server."""
    code, error = start
    assert code == 1, error
    last = [line for line in error.splitlines() if ": failed: " in line]
    assert len(last) == 1, error
    assert "RewardError: reward server http://127.0.0.1:" in last[0]
    assert reason in last[0]


def state(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "disturbed" / "checkpoints" / f"step_{step}" / "state" / "trainer.json").read_text())


@pytest.mark.timeout(300)
def test_a_dead_and_a_slow_server_end_a_run_with_one_line_and_it_goes_on_as_if_they_had_not(
    policy: Path, tmp_path: Path
) -> None:
    # Requests: three of the evaluation at the start, one of each step, one of the evaluations after steps 2 and 4.
    outages = [("dies", 7), ("hangs", 3), ("never", 0)]
    options = [*PPO.split(), *JUDGED.split(), f"pretrain={policy}"]
    dead, slow, whole = meet("openrlhf_ppo", tmp_path, "remote_rm_url", options, outages)

    # Died in step 3, before it was trained on: its answers wait. Slow after step 4 was: that is not taken back.
    checked_failure(dead, "ConnectError")
    (queued,) = state(tmp_path, 2)["stream"]["queue"]
    assert queued["batch"] == {"__batch__": "batch-stream-queue-0-batch.parquet"}
    checked_failure(slow, "ReadTimeout")
    assert "queue" not in state(tmp_path, 4)["stream"]
    assert state(tmp_path, 4)["unrecorded"]["batch"] == {"__batch__": "unrecorded.parquet"}
    assert "reward/reward" in state(tmp_path, 4)["unrecorded"]["metrics"]
    assert whole[0] == 0, whole[1]
    lines = RunFolder(tmp_path / "disturbed").metrics
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    # Held-out answers are scored by eval_scorer, which gives all or nothing; the server gives fifths of an answer.
    for line in (lines[1], lines[3], lines[5]):
        assert (line["eval/sort_pass1"] * 32).is_integer()
        assert line["eval/sort_reward"] > line["eval/sort_pass1"]
    same_end(tmp_path)


@pytest.mark.timeout(300)
def test_where_rewards_belong_to_the_generation_it_is_done_again(policy: Path, tmp_path: Path) -> None:
    options = [*GRPO.split(), f"model.path={policy}"]
    dead, whole = meet("grpo", tmp_path, "reward.source", options, [("dies", 3), ("never", 0)])
    checked_failure(dead, "ConnectError")
    assert state(tmp_path, 2)["stream"] == {"step": 2}
    assert state(tmp_path, 2)["prompts"]["position"] == 16  # of two steps
    assert whole[0] == 0, whole[1]
    same_end(tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_ahead_of_training_what_is_in_the_queue_waits_too(ray_address: str, policy: Path, tmp_path: Path) -> None:
    given = PPO.replace("max_samples=48", "max_samples=32 async_train=true init_kl_coef=0")
    options = [*given.split(), f"pretrain={policy}"]
    held = held_port()
    server = Server(held, fails="dies", at=3)
    run = Run("openrlhf_ppo", ray_address, tmp_path / "run", *options, f"remote_rm_url={server.url}").wait()
    server.close()
    checked_failure((run.code, run.err), "ConnectError")
    saved = json.loads((run.run_dir / "checkpoints" / "step_2" / "state" / "trainer.json").read_text())
    assert len(saved["stream"]["queue"]) >= 1
    assert "saved for when the rewards are back: step 2, and " in run.out

    server = Server(held)
    run = Run("openrlhf_ppo", ray_address, tmp_path / "run", *options, f"remote_rm_url={server.url}").wait()
    server.close()
    held.close()
    assert run.code == 0, run.err
    trained = [prompt for step in range(1, 5) for prompt in prompts_of(run, step)]
    assert len(trained) == len(set(trained)) == 32


def prompts_of(run: Run, step: int) -> set[int]:
    return set(Batch.load(run.run_dir / "rollouts" / f"step_{step:06d}.parquet")["prompt_id"].tolist())

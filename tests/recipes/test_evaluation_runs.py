"""Held-out scores and responses without a reward, in all files of a run."""

import re
from pathlib import Path

import pyarrow.parquet
import pytest
from local_runs import run_here
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.messages import says
from tests.plugins.wandb.test_sink import history, wandb_records

OPTIONS = """data.path=task:sort data.max_prompt_tokens=16 rollout.max_new_tokens=8 prompts_per_step=8
    samples_per_prompt=4 max_steps=3"""


def test_the_score_of_step_0_and_of_each_evaluation_is_in_every_output(policy: Path, tmp_path: Path) -> None:
    held = "evaluation.path=task:sort evaluation.max_samples=16 evaluation.samples_per_prompt=2 evaluation.every=2"
    options = [f"model.path={policy}", *OPTIONS.split(), *held.split(), "evaluation.greedy=true"]
    run = run_here("grpo", tmp_path / "run", *options, "log.tensorboard=true", "log.wandb=true")
    assert run.code == 0, run.err
    for name in ("eval/score", "eval/score_greedy", "eval/sort_score", "eval/pass2"):
        scores = {line["step"]: line[name] for line in run.lines if name in line}
        assert list(scores) == [0, 2, 3]
        assert run.lines[0].keys() - {"step", "time"} == {key for key in run.lines[0] if key.startswith("eval/")}
        board = EventAccumulator(str(run.run_dir / "tensorboard"))
        board.Reload()
        drawn = {event.step: event.value for event in board.Scalars(name)}
        assert drawn == {step: pytest.approx(score) for step, score in scores.items()}
        (records,) = wandb_records(run.run_dir)
        sent = {row["step"]: row[name] for row in history(records) if name in row}
        assert sent == {step: pytest.approx(score) for step, score in scores.items()}
    assert run.summary["score"]["start"] == run.lines[0]["eval/score"]
    for line in (line for line in run.lines if "eval/score" in line):
        assert re.search(rf"step={line['step']} .*eval/score={line['eval/score']:.4g} ", run.out)
    evaluated = [line for line in run.metrics if "eval/score" in line]
    best = max(evaluated, key=lambda line: (line["eval/score"], -line["step"]))
    assert (run.run_dir / "checkpoints" / "best").read_text().strip() == f"step_{best['step']}"


REWARD = """
def reward_func(prompts, completions, **kwargs):
    # No reward for what begins with one of the first letters.
    return [None if text[:1] < "e" else float(len(set(text))) for text in completions]
"""


def test_a_response_without_a_reward_is_excluded_from_baselines_and_training(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    options = ["algorithm.std_norm=false", "reward.max_failed_share=0.9", f"reward.source={tmp_path}/reward.py"]
    run = run_here("grpo", tmp_path / "run", f"model.path={policy}", *OPTIONS.split(), *options)
    assert run.code == 0, run.err
    for line in run.metrics:
        step = line["step"]
        kept = pyarrow.parquet.read_table(run.run_dir / f"rollouts/step_{step:06d}.parquet").to_pylist()
        failed = pyarrow.parquet.read_table(run.run_dir / f"failed/step_{step:06d}-rewards.parquet").to_pylist()
        assert (len(kept) + len(failed), line["reward/failed"]) == (32, len(failed))
        assert 0 < len(failed) < 32
        assert line["reward/reward"] == pytest.approx(sum(row["reward"] for row in kept) / len(kept))
        assert re.search(says(f"step {step}", f"{len(failed)} of 32", f"step_{step:06d}-rewards.parquet"), run.out)
        for row in kept:
            group = [other["reward"] for other in kept if other["prompt_id"] == row["prompt_id"]]
            worth = row["reward"] - sum(group) / len(group)
            advantages = [x for x, is_own in zip(row["advantage"], row["action_mask"], strict=True) if is_own]
            assert advantages == pytest.approx([worth] * len(advantages), abs=1e-5)


def test_a_step_in_which_no_response_has_a_reward_ends_the_run(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward_func(prompts, completions, **kwargs): return [None] * len(prompts)")
    options = ["reward.max_failed_share=1", f"reward.source={tmp_path}/reward.py"]
    run = run_here("grpo", tmp_path / "run", f"model.path={policy}", *OPTIONS.split(), *options)
    assert run.code == 1
    assert re.search(says("0 of 32", "reward"), run.err.splitlines()[-1])

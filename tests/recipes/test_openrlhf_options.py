"""Options of recipes/openrlhf_ppo that change the composition of a step, in complete runs."""

import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from local_runs import LocalRun, run_here
from safetensors.torch import load_file

from tests.messages import says

SMALL = {
    "prompt_data": "task:sort",
    "max_samples": 32,
    "rollout_batch_size": 16,
    "n_samples_per_prompt": 4,
    "train_batch_size": 32,
    "use_dynamic_batch": "true",
    "generate_max_len": 8,
    "actor_learning_rate": 3e-4,
    "lr_scheduler": "constant",
    "lr_warmup_ratio": 0,
    "zero_stage": 1,
    "init_kl_coef": 0,
    "advantage_estimator": "group_norm",
}
"""Two steps of 16 prompts x 4 responses, two optimizer steps each."""

COIN = """
def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": [float(sum(map(ord, query)) % 2) for query in queries]}
"""
"""About half of all responses are correct, so about an eighth of the prompts have equal rewards for all responses."""

Start = Callable[..., LocalRun]


@pytest.fixture(scope="module")
def start(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Run the recipe to its end in a new folder, or in the given one."""
    reward_file = tmp_path_factory.mktemp("reward") / "coin.py"
    reward_file.write_text(COIN)

    def run(run_dir: Path | None = None, **options: Any) -> LocalRun:
        chosen = {"pretrain": policy, "remote_rm_url": reward_file} | SMALL | options
        folder = run_dir or tmp_path_factory.mktemp("run") / "run"
        done = run_here("openrlhf_ppo", folder, *(f"{name}={value}" for name, value in chosen.items()))
        assert done.code == 0, done.err
        return done

    return run


@pytest.fixture(scope="module")
def plain(start: Start) -> LocalRun:
    return start()


def weights(run: LocalRun, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.run_dir / f"checkpoints/step_{step}/hf/model.safetensors")


@pytest.fixture(scope="module")
def filtered(start: Start) -> LocalRun:
    return start(dynamic_filtering=True, eval_dataset="task:sort", **{"evaluation.max_samples": 32})


def test_filtered_prompts_are_replaced_until_the_data_ends(filtered: LocalRun) -> None:
    run = filtered
    trained: list[int] = []
    scores: dict[int, list[float]] = {}
    for entry in run.metrics:
        path = run.run_dir / "rollouts" / f"step_{entry['step']:06d}.parquet"
        rows = pyarrow.parquet.read_table(path, columns=["prompt_id", "score"]).to_pydict()
        scores = defaultdict(list)
        for prompt, score in zip(rows["prompt_id"], rows["score"], strict=True):
            scores[prompt].append(score)
        assert all(len(group) == 4 and 0 < sum(group) / 4 < 1 for group in scores.values())
        trained += scores
        seen = entry["rollout/filter_prompts_seen"]
        assert len(scores) == pytest.approx(entry["rollout/filter_pass_rate"] * seen)
    # All 32 prompts were tried once. The prompts that had passed by then form the last, smaller step.
    assert sum(entry["rollout/filter_prompts_seen"] for entry in run.metrics) == 32
    assert len(trained) == len(set(trained)) == 16 + len(scores)
    assert 0 < len(scores) < 16
    assert re.search(says("at most 2 steps", "16 prompts"), run.out)
    assert re.search(says(f"{run.metrics[-1]['rollout/filter_prompts_seen']:.0f} prompts"), run.out)
    assert (run.summary["status"], run.summary["steps"]) == ("finished", 2)
    assert run.summary["score"]["end"] == run.metrics[-1]["eval/score"]


def test_a_run_in_which_no_prompt_passes_the_filter_fails_with_the_option_to_set(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "coin.py").write_text(COIN)
    options = SMALL | {"dynamic_filtering": True, "dynamic_filtering_reward_range": "[1.5,2]"}
    options |= {"pretrain": policy, "remote_rm_url": tmp_path / "coin.py"}
    run = run_here("openrlhf_ppo", tmp_path / "run", *(f"{name}={value}" for name, value in options.items()))
    assert run.code == 1
    assert re.search(says(32, 0, 1.5, 2.0), run.err)
    assert run.summary["status"] == "failed"


def test_a_resumed_filtered_run_continues_with_the_remaining_prompts(
    filtered: LocalRun, start: Start, tmp_path: Path
) -> None:
    options = {"eval_dataset": "task:sort", "evaluation.max_samples": 32}
    shutil.copytree(filtered.run_dir, tmp_path / "one")
    # Nothing of the first epoch is left, with and without filtering.
    again = start(tmp_path / "one", **options)
    assert len(again.metrics) == len(filtered.metrics)
    assert again.summary["status"] == "finished"
    # A second epoch has 32 further prompts with new ids.
    second = start(tmp_path / "one", **options, dynamic_filtering=True, num_episodes=2)
    assert sum(entry["rollout/filter_prompts_seen"] for entry in second.metrics) == 64
    ids: list[int] = []
    for entry in second.metrics:
        path = second.run_dir / "rollouts" / f"step_{entry['step']:06d}.parquet"
        ids += set(pyarrow.parquet.read_table(path, columns=["prompt_id"])["prompt_id"].to_pylist())
    assert len(ids) == len(set(ids))
    assert max(ids) >= 32


def test_averaging_saves_the_averaged_weights_and_changes_nothing_else(
    plain: LocalRun, start: Start, policy: Path
) -> None:
    run = start(enable_ema=True, ema_beta=0.5)
    assert run.learnt() == plain.learnt()
    first, last, average = load_file(policy / "model.safetensors"), weights(plain, 2), weights(run, 2)
    moved = sum(float((last[name] - first[name]).abs().sum()) for name in average)
    behind = sum(float((last[name] - average[name]).abs().sum()) for name in average)
    # After four optimizer steps the initial weights count a sixteenth, the final ones a half.
    assert 0 < behind < moved


def test_a_resumed_run_restores_the_adaptive_kl_coefficient_and_the_average(start: Start, tmp_path: Path) -> None:
    options = {"init_kl_coef": 0.5, "kl_target": 1e-9, "kl_horizon": 128, "use_kl_loss": True, "kl_estimator": "k3+"}
    options |= {"enable_ema": True, "policy_loss_type": "clip_cov", "enable_vllm_is_correction": True}
    whole = start(**options, num_episodes=2)
    # 64 responses per step are half of the horizon, so the coefficient changes by a tenth.
    for before, after in pairwise(whole.metrics):
        factor = 1.1 if before["actor/kl_loss"] > 1e-9 else 0.9
        assert after["actor/kl_coef"] == pytest.approx(factor * before["actor/kl_coef"])
    half = start(**options)
    assert len(half.metrics) == 2
    rest = start(half.run_dir, **options, num_episodes=2)
    assert rest.learnt() == whole.learnt()
    for name, tensor in weights(whole, 4).items():
        assert torch.equal(tensor, weights(rest, 4)[name]), name

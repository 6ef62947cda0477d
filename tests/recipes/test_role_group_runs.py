"""grpo, whose roles are called as groups, in complete runs: ranks, engines, micro-batches and failures do not change
the results. reinforce_pp has the same roles.
"""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from gates import Gate, source
from local_runs import run_locally
from recipe_runs import Run, RunFolder
from safetensors.torch import load_file

from components.batch.grouping import group_by
from components.batch.reading import load_batch

REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    # The share of letters that come later than the one before: a model that has hardly learnt earns some of it.
    while is_shut():
        time.sleep(0.01)
    responses = [query[len(prompt):len(prompt) + 5] for query, prompt in zip(queries, prompts)]
    return {"rewards": [sum(a < b for a, b in zip(response, response[1:])) / 4 for response in responses]}
"""
COMMON = """
    data.path=task:sort data.max_prompt_tokens=16 evaluation.path=task:sort evaluation.max_samples=32
    evaluation.greedy=true evaluation.samples_per_prompt=1 prompts_per_step=8 samples_per_prompt=4
    train.mini_batch_size=16 rollout.max_new_tokens=8
    train.learning_rate=1e-3 train.eps=1e-5 algorithm.kl_coef=0.05
"""
"""Adam divides by the root of its second moment. With a small epsilon it would scale rounding errors of irrelevant
gradients up to complete steps.
"""
TWO_STEPS = ["data.max_samples=16"]
LONG = ["data.max_samples=62", "checkpoint.every=2", "algorithm.kl_coef=0", "algorithm.filter_range=[0.3,0.7]"]
"""Seven steps of 8 prompts, and 6 more prompts. Prompts that are too easy or too hard are dropped."""
APART = """placement.colocate=false placement.actor_ranks=2 placement.rollout_engines=2 placement.references=2
    placement.frozen_models=sharded train.zero_stage=2
"""


def options(policy: Path, folder: Path, *gates: Gate) -> list[str]:
    """Return the options of all runs. Rewards wait at the gates without a timeout."""
    (folder / "reward.py").write_text(source(*gates) + REWARD)
    arguments = [f"model.path={policy}", f"reward.source={folder}/reward.py", "reward.timeout_s=600"]
    return [*COMMON.split(), *arguments]


@pytest.fixture(scope="module")
def local(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """Runs in this process."""
    folder = tmp_path_factory.mktemp("grpo")
    common = options(policy, folder)
    still = ["train.learning_rate=0", "train.mini_batch_size=32", "algorithm.kl_coef=0"]
    runs = {
        "plain": [*common, *TWO_STEPS],
        "cut": [*common, *TWO_STEPS, "train.max_tokens=64"],
        "still": [*common, *TWO_STEPS, *still],
        "alone": [*common, *TWO_STEPS, "algorithm.kl_coef=0"],
        "long": [*common, *LONG],
    }
    return {**run_locally("grpo", folder, runs)}


@pytest.fixture(scope="module")
def reinforce(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two steps of reinforce_pp with its baseline."""
    folder = tmp_path_factory.mktemp("reinforce_pp")
    arguments = [*options(policy, folder), *TWO_STEPS, "algorithm.baseline=group_mean"]
    return run_locally("reinforce_pp", folder, {"plain": arguments})["plain"]


def agree(one: RunFolder, other: RunFolder) -> None:
    """Compare two runs: responses are equal, and other values within 1e-5."""
    assert one.summary["steps"] == other.summary["steps"] == 2
    for step in (1, 2):
        tokens = [load_batch(run.run_dir / f"rollouts/step_{step:06d}.parquet")["tokens"] for run in (one, other)]
        assert tokens[0].equal(tokens[1])
    for ours, theirs in zip(one.learnt(), other.learnt(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    exported = [load_file(run.run_dir / "checkpoints/step_2/hf/model.safetensors") for run in (one, other)]
    assert exported[0].keys() == exported[1].keys()
    for name, tensor in exported[0].items():
        torch.testing.assert_close(tensor, exported[1][name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("recipe", ["grpo", "reinforce_pp"])
def test_the_outputs_of_a_run_are_consistent(recipe: str, local: dict[str, RunFolder], reinforce: RunFolder) -> None:
    run = {"grpo": local["plain"], "reinforce_pp": reinforce}[recipe]
    assert (run.summary["status"], run.summary["recipe"], run.summary["seed"]) == ("finished", recipe, 42)
    assert run.summary["score"]["examples"] == 32
    assert [line["step"] for line in run.metrics] == [1, 2]
    for name in ("config.yaml", "environment.json", "plan.json", "events.jsonl", "checkpoints/latest"):
        assert (run.run_dir / name).is_file(), name
    samples = load_batch(run.run_dir / "rollouts/step_000002.parquet")
    assert len(samples) == 32
    columns = {"logprob", "reference_logprob", "rollout_logprob", "advantage", "reward", "shaped_reward", "status"}
    assert columns <= set(samples.names)
    assert run.metrics[1]["reward/reward"] == pytest.approx(float(samples["reward"].mean()))
    assert 0 < run.metrics[1]["reward/reward"] < 1


def test_the_first_update_of_each_step_starts_at_ratio_one(local: dict[str, RunFolder], reinforce: RunFolder) -> None:
    for line in [*local["plain"].metrics, *local["cut"].metrics, *local["still"].metrics, *reinforce.metrics]:
        assert line["actor/first_ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_engine_and_trainer_agree_on_log_probs_with_and_without_recomputation(
    local: dict[str, RunFolder], reinforce: RunFolder
) -> None:
    for line in [*local["plain"].metrics, *reinforce.metrics]:
        assert line["rollout/logprob_gap_max"] < 1e-4
        assert line["actor/first_engine_gap"] < 1e-4
    for line in local["still"].metrics:  # one optimizer step and no KL: log-probabilities are not recomputed
        assert "rollout/logprob_gap_max" not in line
        assert line["rollout/logprob_gap_mean"] == line["actor/first_engine_gap"] < 1e-4


def test_with_learning_rate_zero_weights_and_scores_do_not_change(local: dict[str, RunFolder], policy: Path) -> None:
    score = local["still"].summary["score"]
    assert (score["end"], score["end_greedy"]) == (score["start"], score["start_greedy"])
    assert score["end_greedy"] is not None
    exported = local["still"].run_dir / "checkpoints/step_2/hf/model.safetensors"
    before, after = load_file(policy / "model.safetensors"), load_file(exported)
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not tensor.equal(after[name])] == []


def test_the_size_of_micro_batches_does_not_change_a_run(local: dict[str, RunFolder]) -> None:
    agree(local["cut"], local["plain"])


@pytest.mark.nightly
def test_two_ranks_resumed_after_a_killed_driver_match_one_rank(
    policy: Path, local: dict[str, RunFolder], ray_address: str, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "run/checkpoints/step_1", tmp_path / "go")
    ranks = ["placement.actor_ranks=2", "train.zero_stage=2"]
    arguments = [*options(policy, tmp_path, gate), *TWO_STEPS, *ranks, "algorithm.kl_coef=0", "checkpoint.every=1"]
    run = Run("grpo", ray_address, tmp_path / "run", *arguments)
    run.wait_until(gate.is_reached)
    assert len(run.kill()) == 4
    gate.open()

    again = Run("grpo", ray_address, tmp_path / "run", *arguments).wait()
    assert again.code == 0, again.err
    assert again.summary["resumed_from"] == 1
    agree(again, local["alone"])
    assert again.starts().keys() == {"trainer-0", "actor-0", "actor-1", "rollout-0"}
    assert again.left_behind() == []


@pytest.mark.nightly
def test_two_separate_ranks_engines_and_references_match_one_of_each(
    policy: Path, local: dict[str, RunFolder], ray_address: str, tmp_path: Path
) -> None:
    arguments = [*options(policy, tmp_path), *TWO_STEPS, *APART.split()]
    run = Run("grpo", ray_address, tmp_path / "run", *arguments).wait()
    assert run.code == 0, run.err
    agree(run, local["plain"])
    assert run.starts().keys() == {
        "trainer-0",
        *(f"{role}-{i}" for role in ("actor", "rollout", "reference") for i in (0, 1)),
    }
    assert run.left_behind() == []


def test_filtered_steps_are_filled_up_and_the_last_one_uses_the_remaining_prompts(local: dict[str, RunFolder]) -> None:
    run = local["long"]
    sizes = [len(load_batch(file)) for file in sorted((run.run_dir / "rollouts").glob("*.parquet"))]
    *whole, last = run.metrics
    assert sizes[:-1] == [32] * len(whole)
    assert 0 < sizes[-1] < 32
    passed = last["rollout/filter_pass_rate"] * last["rollout/filter_prompts_seen"]
    assert passed == pytest.approx(sizes[-1] / 4)
    assert sum(line["rollout/filter_prompts_seen"] for line in run.metrics) == 62
    assert max(line["rollout/filter_rounds"] for line in run.metrics) > 1
    for line in whole:
        # Eight prompts passed of those that were tried.
        assert line["rollout/filter_pass_rate"] == pytest.approx(8 / line["rollout/filter_prompts_seen"])
    for file in (run.run_dir / "rollouts").glob("*.parquet"):
        samples = load_batch(file)
        means = [part["score"].mean() for part in group_by(samples, "prompt_id").values()]
        assert all(0.3 < mean < 0.7 for mean in means)


@pytest.mark.full
def test_a_run_whose_engine_and_driver_were_killed_equals_an_undisturbed_run(
    policy: Path, local: dict[str, RunFolder], ray_address: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    first = Gate(folder / "tokenizer", tmp_path / "first")  # written at the end of the first step
    second = Gate(folder / "checkpoints/step_2", tmp_path / "second")
    arguments = [*options(policy, tmp_path, first, second), *LONG]
    run = Run("grpo", ray_address, folder, *arguments)
    run.wait_until(first.is_reached)
    os.kill(run.pids()["rollout-0"], signal.SIGKILL)
    first.open()
    run.wait_until(second.is_reached)
    assert len(run.starts()["rollout-0"]) == 2
    assert len(run.kill()) == 3
    second.open()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "job"] == ["start", "lost", "replaced"]

    again = Run("grpo", ray_address, folder, *arguments).wait()
    assert again.code == 0, again.err
    undisturbed = local["long"]
    assert again.summary["resumed_from"] == 2
    assert again.summary["steps"] == undisturbed.summary["steps"]
    assert again.summary["score"] == undisturbed.summary["score"]
    assert again.learnt() == undisturbed.learnt()
    ours, theirs = again.weights(), undisturbed.weights()
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not tensor.equal(theirs[name])] == []
    assert again.left_behind() == []

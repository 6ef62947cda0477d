"""The reference is the initial policy in every implementation: the KL is 0 in the first step, and positive in
the next.
"""

import json
from pathlib import Path

import pytest
import torch
from local_runs import run_here
from recipe_runs import RunFolder

from components.batch.reading import load_batch

COMMON = """
    data.path=task:sort data.max_samples=8 data.max_prompt_tokens=16 data.epochs=1 prompts_per_step=4
    samples_per_prompt=4 rollout.max_new_tokens=8 train.mini_batch_size=8 train.packing=true train.learning_rate=1e-2
    algorithm.kl_coef=0.05
"""
REWARD = """
def worth(text):
    return sum(ord(letter) for letter in text) % 7 / 7

def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": [worth(query) for query in queries]}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return worth(solution_str)
"""
"""Rewards differ between responses, because equal rewards give no gradient."""
ADAPTERS = "train.lora_rank=4"
CASES = {
    "grpo_offloaded": "train.precision=bf16_autocast placement.frozen_models=offloaded",
    "grpo_adapters": f"train.precision=bf16_autocast {ADAPTERS}",
    "openrlhf_ppo_adapters": f"algorithm.estimator=grpo train.precision=bf16 {ADAPTERS}",
    "verl_ppo_adapters": f"algorithm.estimator=grpo {ADAPTERS}",
}


@pytest.fixture(scope="module")
def runs(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    folder, folders = tmp_path_factory.mktemp("reference"), {}
    (folder / "reward.py").write_text(REWARD)
    common = [f"model.path={policy}", f"reward.source={folder}/reward.py", *COMMON.split()]
    for name, options in CASES.items():
        recipe = name.rpartition("_")[0]
        run = run_here(recipe, folder / name, *common, *options.split())
        assert run.code == 0, run.err
        folders[name] = run
    return folders


@pytest.mark.parametrize("case", CASES)
def test_the_kl_is_exactly_0_in_the_first_step_and_not_in_the_second(case: str, runs: dict[str, RunFolder]) -> None:
    steps = [load_batch(runs[case].run_dir / f"rollouts/step_{step:06d}.parquet") for step in (1, 2)]
    gaps = [(step["logprob"] - step["reference_logprob"])[step["action_mask"]].abs() for step in steps]
    assert torch.equal(gaps[0], torch.zeros(len(gaps[0])))
    assert gaps[1].max() > 1e-3
    assert steps[1]["reference_logprob"].abs().max() > 0.1


@pytest.mark.parametrize("case", CASES)
def test_a_policy_with_adapters_has_no_reference_role(case: str, runs: dict[str, RunFolder]) -> None:
    roles = json.loads((runs[case].run_dir / "plan.json").read_text())["roles"]
    kinds = {name: spec["kind"] for name, spec in roles.items() if name in ("REFERENCE", "REF")}
    assert kinds == ({"REFERENCE": "train"} if case == "grpo_offloaded" else {})

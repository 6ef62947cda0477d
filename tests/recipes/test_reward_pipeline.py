"""A reward model trained on pairs, and a policy trained on its rewards: its true score rises.

The numbers of the complete demonstration, over three seeds, are in recipes/openrlhf_ppo/README.md.
"""

from pathlib import Path

import pytest
from local_runs import run_locally
from recipe_runs import ROOT

from components.models.sources import resolve_model


@pytest.mark.nightly
def test_a_policy_learns_the_task_from_a_reward_model_trained_on_pairs(tmp_path: Path) -> None:
    resolve_model("warm_start:sort")
    model, preset = tmp_path / "model", ROOT / "recipes" / "openrlhf_ppo" / "reward_model.yaml"
    pairs = ["data.max_samples=5512", "evaluation.held_out=500", "train.epochs=1", f"checkpoint.export_path={model}"]
    learnt = run_locally("reward_model", tmp_path, {"rm": ["seed=1", *pairs]})["rm"]
    assert learnt.metrics[-1]["eval/accuracy"] > 0.9

    # 8 of the preset's 30 steps. In the first two only the critic, which starts from the reward model, is trained.
    options = [
        f"config={preset}",
        f"reward_pretrain={model}",
        "max_samples=512",
        "eval_steps=4",
        "evaluation.max_samples=256",
    ]
    run = run_locally("openrlhf_ppo", tmp_path, {"ppo": ["seed=1", *options]})["ppo"]
    score, evaluated = run.summary["score"], [line for line in run.metrics if "eval/sort_score" in line]
    assert [line["step"] for line in evaluated] == [4, 8]
    assert score["end"] == evaluated[-1]["eval/score"]
    # Measured, seed 1, with 10 steps: .20 -> .65.
    assert score["end"] - score["start"] > 0.3
    assert evaluated[-1]["eval/sort_reward"] > evaluated[0]["eval/sort_reward"]

"""In the first optimizer step of a batch the ratio is exactly 1, because the current policy is the old policy.

A separate pass of the same policy could round differently, because its micro-batches have other rows.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from local_runs import kept_environment
from recipe_runs import ROOT

from components.batch import Batch
from components.batch.reading import load_batch
from components.process.code_files import load_file
from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer, tiny_model
from recipes.openrlhf_ppo.layout import resolved

GOLDEN = Path(__file__).parent / "golden"
golden: Any = load_file(ROOT / "scripts" / "golden.py")

NAMES = {
    "grpo": "algorithm.kl_coef=0 data.path=task:sort train.mini_batch_size=8 samples_per_prompt=4 prompts_per_step=4",
    "openrlhf_ppo": "prompt_data=task:sort init_kl_coef=0 train_batch_size=8 n_samples_per_prompt=4 "
    "rollout_batch_size=4 advantage_estimator=group_norm lr_warmup_ratio=0",
}
"""Options of two optimizer steps of 8 responses."""


def updated(recipe: str, precision: str, folder: Path, experience: Batch) -> dict[str, float]:
    """Return the metrics of a step whose old log-probabilities are half a nat above the policy's."""
    tokenizer = task_tokenizer(get_task("sort"))
    tiny_model(tokenizer, 0, hidden=32, layers=1, intermediate=64).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    options = f"run_dir={folder} model.path={folder}/model train.precision={precision} {NAMES[recipe]}"
    config = import_module(f"recipes.{recipe}.main").read_config(options.split())
    if recipe == "openrlhf_ppo":
        config = resolved(config)
    with kept_environment(), golden.Stage(folder) as stage:
        actor = stage.role(import_module(f"recipes.{recipe}.roles.actor").Actor, config)
        actor["load"](f"{folder}/model", 1)
        logprob_N = actor["logprobs"](experience.only("tokens"), temperature=1.0)["logprob"]
        advantage_N = 1.0 * experience["action_mask"]
        experience = experience.with_tokens(logprob=logprob_N + 0.5, advantage=advantage_N)
        if recipe == "grpo":
            return actor["update"](experience, 1)
        actor["append_experience"](experience)
        return actor["actor_update"](1, 0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_autocast"])
@pytest.mark.parametrize("recipe", NAMES)
def test_the_first_ratio_is_1_for_any_result_of_an_earlier_pass(recipe: str, precision: str, tmp_path: Path) -> None:
    rollouts = load_batch(GOLDEN / f"{recipe}.parquet")
    metrics = updated(recipe, precision, tmp_path, rollouts.select((rollouts["step"] == 0).nonzero().squeeze(1)))
    assert metrics["first_ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    # The mean of both optimizer steps: 1 and about exp(-0.5).
    assert 0.6 < metrics["ratio_mean"] < 0.9

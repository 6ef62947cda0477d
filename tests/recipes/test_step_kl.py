"""With one optimizer step per batch the KL to the previous policy is measured on a sample of the responses."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from local_runs import kept_environment
from recipe_runs import ROOT

from components.batch import Batch
from components.batch.reading import load_batch
from components.process.code_files import load_file
from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer, tiny_model

pytestmark = pytest.mark.full

GOLDEN = Path(__file__).parent / "golden"
golden: Any = load_file(ROOT / "scripts" / "golden.py")


def updated(folder: Path, size: int, rate: float) -> tuple[dict[str, float], Batch, torch.Tensor, torch.Tensor]:
    """Return the metrics of a step with optimizer steps of `size` responses, its batch, and log-probs before
    and after.
    """
    rollouts = load_batch(GOLDEN / "grpo.parquet")
    experience = rollouts.select((rollouts["step"] == 0).nonzero().squeeze(1))
    experience = experience.with_tokens(advantage=1.0 * experience["action_mask"])
    tokenizer = task_tokenizer(get_task("sort"))
    tiny_model(tokenizer, 0, hidden=32, layers=1, intermediate=64).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    options = f"run_dir={folder} model.path={folder}/model data.path=task:sort algorithm.kl_coef=0 prompts_per_step=4 "
    options += f"samples_per_prompt=4 train.mini_batch_size={size} train.learning_rate={rate} train.lr_warmup_ratio=0"
    config = import_module("recipes.grpo.main").read_config(options.split())
    with kept_environment(), golden.Stage(folder) as stage:
        actor = stage.role(import_module("recipes.grpo.roles.actor").Actor, config)
        actor["load"](f"{folder}/model", 1)
        tokens = experience.only("tokens")
        before_N = actor["logprobs"](tokens, temperature=1.0)["logprob"]
        if size < len(experience):
            experience = experience.with_tokens(logprob=before_N)
        metrics = actor["update"](experience, 1)
        return metrics, experience, before_N, actor["logprobs"](tokens, temperature=1.0)["logprob"]


def test_the_kl_of_one_optimizer_step_is_that_of_the_sampled_responses(tmp_path: Path) -> None:
    metrics, experience, before_N, after_N = updated(tmp_path, 16, 1e-2)
    assert metrics["approx_kl"] == 0.0
    both = experience.with_tokens(before=before_N, after=after_N)
    # 16 responses, the minimum, at equal distances.
    pairs = [
        (before, after)
        for row in (0, 4, 8, 12)
        for before, after, acts in zip(*(both.row(row, name).tolist() for name in ("before", "after", "action_mask")))
        if acts
    ]
    k3 = [2.718281828459045 ** (after - before) - 1 - (after - before) for before, after in pairs]
    assert metrics["step_kl"] == pytest.approx(sum(k3) / len(k3), rel=1e-4)
    assert metrics["step_kl"] > 1e-3


def test_an_unchanged_policy_has_a_kl_of_0(tmp_path: Path) -> None:
    metrics, _, before_N, after_N = updated(tmp_path, 16, 1e-30)
    assert torch.equal(before_N, after_N)
    assert metrics["step_kl"] == 0.0


def test_with_several_optimizer_steps_only_the_kl_of_the_loss_is_logged(tmp_path: Path) -> None:
    metrics, *_ = updated(tmp_path, 8, 1e-2)
    assert metrics["approx_kl"] > 0
    assert "step_kl" not in metrics

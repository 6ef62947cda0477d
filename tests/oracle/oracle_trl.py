"""The real TRL compared with recipes/grpo: the same settings, responses and weights, three training steps."""

# pyright: reportMissingImports=false
# TRL is in the environment that scripts/oracle.sh makes, and in no other.
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from differences import Differences
from steps import (
    EPS,
    LONGEST,
    PROMPTS,
    SAMPLES,
    SIZE,
    STEPS,
    Apart,
    Trace,
    make_model,
    make_steps,
    roles,
    weights_of,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from recipes.grpo.algorithm import add_advantages
from recipes.grpo.main import read_config
from recipes.grpo.roles.actor import Actor
from training.roles.reference import ReferenceWorker

RATE = 1e-3


@dataclass
class Case:
    name: str
    options: str
    """Options of the recipe."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of GRPOConfig."""
    why: str = ""
    """Reasons of intended differences."""


def ours(case: Case, path: str, folder: Path) -> Trace:
    common = f"""run_dir={folder} model.path={path} data.path=task:sort prompts_per_step={PROMPTS}
        samples_per_prompt={SAMPLES} train.mini_batch_size={SIZE} rollout.max_new_tokens={LONGEST}
        train.learning_rate={RATE} train.betas=[0.9,0.999] train.eps={EPS} train.weight_decay=0
        train.max_grad_norm=1 train.lr_scheduler=constant train.engine=fsdp train.zero_stage=2"""
    config = read_config([*common.split(), *case.options.split()])
    trace = Trace()
    with roles(folder) as stage:
        actor, reference = stage.role(Actor, config), stage.role(ReferenceWorker, config)
        actor["load"](path, STEPS)
        reference["load"](path)
        for number, samples in enumerate(make_steps(path), 1):
            tokens = samples.only("tokens")
            step = samples.with_tokens(**actor["logprobs"](tokens, temperature=1.0).per_token)
            step = step.with_tokens(**reference["logprobs"](tokens).per_token)
            step = add_advantages(step, config)
            trace.advantages.append(step["advantage"][step["action_mask"]])
            metrics = actor["update"](step, number)
            trace.losses.append(metrics["loss"])
            trace.grad_norms.append(metrics["grad_norm"])
        actor["save"](str(folder / "after"))
        trace.weights = weights_of(AutoModelForCausalLM.from_pretrained(folder / "after"))
    return trace


class Recorded(GRPOTrainer):
    """Trainer that records intermediate values of TRL."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trace, self.all_losses = Trace(), []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        mask_BT = output["completion_mask"].bool()
        self.trace.advantages.append(output["advantages"][:, None].expand_as(mask_BT)[mask_BT])
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        self.all_losses.append(float(loss.detach()))
        return loss


def theirs(case: Case, path: str, folder: Path) -> Trace:
    steps = make_steps(path)
    rows_of_prompt: defaultdict[int, list[tuple[list[int], list[int], float]]] = defaultdict(list)
    for number, step in enumerate(steps):
        for row, (tokens, length) in enumerate(zip(step.lists("tokens"), step["prompt_length"].tolist(), strict=True)):
            response = tokens[:length], tokens[length:], float(step["reward"][row])
            rows_of_prompt[number * PROMPTS + row // SAMPLES].append(response)

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rows = [row for text in dict.fromkeys(prompts) for row in rows_of_prompt[int(text)]]
        assert len(rows) == len(prompts) == SIZE
        ids, completions, rewards = (list(column) for column in zip(*rows, strict=True))
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "earned": rewards}

    def reward(earned: list[float], **_: Any) -> list[float]:
        return earned

    again = case.settings.get("num_iterations", 1)
    settings = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": SIZE,
        "gradient_accumulation_steps": 1,
        "num_generations": SAMPLES,
        "max_completion_length": LONGEST,
        "max_steps": STEPS * again,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_epsilon": EPS,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = Recorded(
        model=path,
        reward_funcs=reward,
        args=GRPOConfig(**settings | case.settings),
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(STEPS * PROMPTS)]}),
        processing_class=AutoTokenizer.from_pretrained(path),
        rollout_func=rollouts,
    )
    trainer.train()
    trace = trainer.trace
    norms = [float(line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
    for values, kept in ((trainer.all_losses, trace.losses), (norms, trace.grad_norms)):
        kept += [sum(values[i : i + again]) / again for i in range(0, len(values), again)]
    trace.weights = weights_of(trainer.model)
    return trace


MEANS = "algorithm.loss_aggregation=seq-mean-token-mean"
CASES = [
    Case("GRPO, the defaults (dapo)", "", {}),
    Case("GRPO, loss_type grpo", MEANS, {"loss_type": "grpo"}),
    Case(
        "GRPO, a KL in the loss",
        f"{MEANS} algorithm.kl_coef=0.1",
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    ),
    Case(
        "Dr. GRPO",
        "algorithm.std_norm=false algorithm.loss_aggregation=seq-mean-token-sum-norm",
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    Case("GRPO, twice over a batch", "train.epochs=2", {"num_iterations": 2}),
    Case(
        "GRPO, twice over a batch, clip-higher",
        "train.epochs=2 algorithm.clip_low=0.01 algorithm.clip_high=0.02",
        {"num_iterations": 2, "epsilon": 0.01, "epsilon_high": 0.02},
    ),
    Case(
        "GSPO, twice over a batch",
        f"{MEANS} train.epochs=2 algorithm.ratio=sequence algorithm.clip_low=3e-4 algorithm.clip_high=4e-4",
        {
            "loss_type": "grpo",
            "num_iterations": 2,
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_recipe_matches_trl(case: Case, tmp_path: Path, differences: Differences) -> None:
    path = make_model(tmp_path / "model")
    start = weights_of(AutoModelForCausalLM.from_pretrained(path))
    apart = Apart.of(ours(case, path, tmp_path / "run"), theirs(case, path, tmp_path), start)
    differences.hold("trl", case.name, apart, case.why)

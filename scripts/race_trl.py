"""TRL's side of scripts/race.py, which runs it in a separate environment. It imports nothing of this project.

    python scripts/race_trl.py settings.json

One process trains for a few steps. After each step it appends a JSON object to steps.jsonl: end time, wall seconds of
each phase, numbers of tokens, and mean reward. The settings have the model folder, the prompts, the sizes and the
number of threads. Everything else is set for speed: no checkpointing of activations, torch's fused AdamW, no
evaluation, no files, no logging. On a GPU the weights are float32 and products bfloat16 (autocast), on a CPU float32.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]: it has an environment of its own


class StepLog(TrainerCallback):
    """Callback that writes a JSON object after each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sums: defaultdict[str, Any] = defaultdict(float)
        """Sums of the step: seconds of the timed functions, and numbers of tokens, which may be tensors."""
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the start of generation and training."""
        self._began = now()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Add the time since the start of the step that was not spent in generation and scoring."""
        self.sums["training_s"] += now() - self._began - self.sums["rollout_s"]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Write the end time of the step, so that differences of end times include everything."""
        self.sums["generation_s"] -= self.sums["sync_s"]
        sums = {name: float(value) for name, value in self.sums.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **sums}) + "\n")
        self.sums.clear()

    def timed(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its seconds are added to a sum."""

        def timed_act(*args: Any, **kwargs: Any) -> Any:
            began = now()
            result = act(*args, **kwargs)
            self.sums[name] += now() - began
            return result

        return timed_act

    def count(self, inputs: dict[str, Any]) -> None:
        """Add the tokens of a micro-batch: the places of its padded rows, and the tokens that are not padding."""
        rows = inputs["prompt_ids"].shape[0]
        length = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
        # Sums stay on the device: reading them here would make the trainer wait for it in every micro-batch.
        lengths_B = inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)
        self.sums["places"] += rows * length
        self.sums["pairs"] += rows * length**2
        self.sums["tokens"] += lengths_B.sum()
        self.sums["token_pairs"] += lengths_B.square().sum()
        self.sums["new_tokens"] += inputs["completion_mask"].sum()


def now() -> float:
    """Return the time when the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def instrument(trainer: GRPOTrainer, log: StepLog) -> None:
    """Time the parts of a trainer. They are private, so another release may not have them; it then raises an error."""
    parts = {
        "_generate_and_score_completions": "rollout_s",
        "_generate_single_turn": "generation_s",
        "_calculate_rewards": "reward_s",
    }
    for method, name in parts.items():
        setattr(trainer, method, log.timed(name, getattr(trainer, method)))
    if trainer.use_vllm:
        trainer.vllm_generation.sync_weights = log.timed("sync_s", trainer.vllm_generation.sync_weights)
    compute_loss = trainer.compute_loss

    def counted_loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        log.count(inputs)
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = counted_loss


def engine_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the generation engine."""
    if settings["engine"] == "transformers":
        return {"use_vllm": False}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        # Asleep, it would read the weights from disk before each generation.
        "vllm_enable_sleep_mode": False,
        "vllm_max_model_length": settings["max_length"],
        # The correction takes a forward pass over all responses, which the other side does not make.
        "vllm_importance_sampling_correction": False,
    }


def rewards(rule: str, completions: list[str], labels: list[str]) -> list[float]:
    """Return the rewards: exact match, or the share of the letter a."""
    if rule == "match":
        return [float(text == label) for text, label in zip(completions, labels, strict=True)]
    return [text.count("a") / max(1, len(text)) for text in completions]


def configuration(settings: dict[str, Any]) -> GRPOConfig:
    """Return TRL's configuration."""
    count = settings["prompts_per_step"] * settings["samples_per_prompt"]
    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "output_dir": settings["folder"],
        "max_steps": settings["steps"],
        "per_device_train_batch_size": settings["rows"],
        "gradient_accumulation_steps": count // settings["rows"],
        "num_generations": settings["samples_per_prompt"],
        "max_completion_length": settings["max_new_tokens"],
        "temperature": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "learning_rate": settings["learning_rate"],
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": on_gpu,
        "gradient_checkpointing": False,
        "use_cpu": not on_gpu,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "disable_tqdm": True,
        "shuffle_dataset": False,
    }
    return GRPOConfig(**{**options, **engine_options(settings), **settings["options"]})


def make_trainer(settings: dict[str, Any], log: StepLog) -> GRPOTrainer:
    """Return TRL's trainer for the settings."""
    rows = [json.loads(text) for text in Path(settings["prompts"]).read_text(encoding="utf-8").splitlines()]

    def score(completions: list[str], label: list[str], **_: Any) -> list[float]:
        result = rewards(settings["reward"], completions, label)
        log.sums["reward"] = sum(result) / len(result)
        return result

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        args=configuration(settings),
        reward_funcs=score,
        train_dataset=Dataset.from_list([{"prompt": row["input"], "label": row["label"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[log],
    )
    instrument(trainer, log)
    return trainer


def main() -> None:
    """Train with the settings of the file in the first argument."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    make_trainer(settings, StepLog(Path(settings["folder"]) / "steps.jsonl")).train()


if __name__ == "__main__":
    main()

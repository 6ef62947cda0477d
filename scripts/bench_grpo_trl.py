"""TRL's side of scripts/bench_grpo.py, which runs it in a separate environment. It imports nothing of this project.

    python scripts/bench_grpo_trl.py settings.json

One process trains for a few steps. After each step it appends a JSON object to steps.jsonl: end time, wall seconds of
generation, mean length of the completions, and mean reward. The settings have the model folder, the prompts, the sizes
and the number of threads. Everything else is set for speed: float32 without autocast or checkpointing, torch's fused
AdamW, no evaluation, no files, no logging.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]: it has an environment of its own


class Clock(TrainerCallback):
    """Callback that writes a JSON object after each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generate_s = self.length = self.reward = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Write the end time of the step, so that differences of end times include everything."""
        row = {"time": time.time(), "generate_s": self.generate_s, "length": self.length, "reward": self.reward}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.generate_s = 0.0


def rewards(rule: str, completions: list[str], labels: list[str]) -> list[float]:
    """Return the rewards: exact match, or the share of the letter a."""
    if rule == "match":
        return [float(text == label) for text, label in zip(completions, labels, strict=True)]
    return [text.count("a") / max(1, len(text)) for text in completions]


def trainer(settings: dict[str, Any], clock: Clock) -> GRPOTrainer:
    """Return TRL's trainer for the settings."""
    rows = [json.loads(text) for text in Path(settings["prompts"]).read_text(encoding="utf-8").splitlines()]
    count = settings["prompts_per_step"] * settings["samples_per_prompt"]
    generation = {}
    if settings["fixed_length"]:
        generation["min_new_tokens"] = settings["max_new_tokens"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["device_batch"],
        gradient_accumulation_steps=count // settings["device_batch"],
        num_generations=settings["samples_per_prompt"],
        max_completion_length=settings["max_new_tokens"],
        generation_kwargs=generation,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=settings["learning_rate"],
        adam_beta2=0.95,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=False,
        gradient_checkpointing=False,
        use_vllm=False,
        use_cpu=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    generate = model.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = generate(*args, **kwargs)
        clock.generate_s += time.perf_counter() - began
        return result

    model.generate = timed

    def score(completions: list[str], completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
        result = rewards(settings["reward"], completions, label)
        clock.length = sum(map(len, completion_ids)) / len(completion_ids)
        clock.reward = sum(result) / len(result)
        return result

    return GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=score,
        train_dataset=Dataset.from_list([{"prompt": row["input"], "label": row["label"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[clock],
    )


def main() -> None:
    """Train with the settings of the file in the first argument."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    clock = Clock(Path(settings["folder"]) / "steps.jsonl")
    trainer(settings, clock).train()


if __name__ == "__main__":
    main()

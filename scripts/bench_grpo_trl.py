"""TRL's side of scripts/bench_grpo.py, run by it in an environment of TRL's own; imports nothing of ours.

    python scripts/bench_grpo_trl.py settings.json

One process trains for a few steps and appends a line of JSON to steps.jsonl after each: when it ended, wall seconds of
generation, mean length of the completions and mean reward. The settings say model folder, prompts,
counts and threads; everything else is what serves speed: float32 without autocast or checkpointing, torch's fused
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
    """Writes a line after each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generate_s = self.length = self.reward = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The time is that of the end, so that nothing falls between two steps."""
        row = {"time": time.time(), "generate_s": self.generate_s, "length": self.length, "reward": self.reward}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.generate_s = 0.0


def rewards(rule: str, completions: list[str], labels: list[str]) -> list[float]:
    """Exact match, or the share of one letter."""
    if rule == "match":
        return [float(text == label) for text, label in zip(completions, labels, strict=True)]
    return [text.count("a") / max(1, len(text)) for text in completions]


def trainer(settings: dict[str, Any], clock: Clock) -> GRPOTrainer:
    """Set TRL up as the settings say."""
    lines = Path(settings["prompts"]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    count = settings["prompts_per_step"] * settings["samples_per_prompt"]
    end = {"min_new_tokens": settings["max_new_tokens"]} if settings["fixed_length"] else {}
    config = GRPOConfig(
        output_dir=settings["folder"],
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["device_batch"],
        gradient_accumulation_steps=count // settings["device_batch"],
        num_generations=settings["samples_per_prompt"],
        max_completion_length=settings["max_new_tokens"],
        generation_kwargs=end,
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
    """Train as the settings say."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    clock = Clock(Path(settings["folder"]) / "steps.jsonl")
    trainer(settings, clock).train()


if __name__ == "__main__":
    main()

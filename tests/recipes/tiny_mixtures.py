"""Tiny mixtures of experts, trained on demonstrations of the task sort like the demonstration's dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from components.batch import Batch
from components.data.supervised import encode_demonstrations
from components.models.causal import token_logprobs
from components.rl.aggregation import LossOutput, Totals
from components.rl.supervised import sft_loss
from components.train.config import TrainConfig
from components.train.opening import open_engine
from plugins.demo.models import SHAPE
from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer

# Two of eight experts compute two thirds as much per token as the dense layer. vLLM's loader of gpt_oss does not tie
# embeddings, and its CPU kernels need heads and experts in multiples of 32.
_MIXTURE = SHAPE | {"head_dim": 32, "num_experts_per_tok": 2, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _MIXTURE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 128},
    "gpt_oss": _MIXTURE
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "intermediate_size": 128,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Shapes by family."""


def write_imitator(family: str, folder: Path, steps: int = 150) -> float:
    """Train a float32 mixture on demonstrations, most of which are not sorted, and write it. Return the last loss.

    Args:
        family: a key of `FAMILIES`.
        folder: folder of the model and its tokenizer.
        steps: number of optimizer steps. Fewer steps give a model that is further from the demonstrations.
    """
    task = get_task("sort")
    tokenizer = task_tokenizer(task)
    special: dict[str, Any] = {
        name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")
    }
    config = AutoConfig.for_model(**FAMILIES[family], vocab_size=len(tokenizer), dtype="float32", **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config.update(**special)

    def loss(model: nn.Module, batch: Batch, totals: Totals) -> LossOutput:
        return sft_loss(token_logprobs(model, batch).logprob_N, batch["loss_mask"], totals.tokens)

    lessons = task.lessons
    rows = task.demonstrations(lessons.steps * lessons.batch_size, 0)
    batches = encode_demonstrations(rows, tokenizer).batch.split(lessons.steps)[:steps]
    schedule: dict[str, Any] = {
        "lr_scheduler": "cosine_with_min_lr",
        "lr_warmup_ratio": 0.1,
        "min_lr_ratio": 0.1,
        "total_steps": lessons.steps,
    }
    engine = open_engine(model, TrainConfig(learning_rate=lessons.learning_rate, seed=0, **schedule))
    metrics = [engine.train_step(batch, loss) for batch in batches]
    engine.save_hf(folder, tokenizer)
    return metrics[-1]["loss"]

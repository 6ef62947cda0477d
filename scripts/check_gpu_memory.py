"""Check of stage a: memory of training large models, compared with the estimate of the plan."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from check_gpu_parts import (
    TINY,
    Row,
    Setting,
    inferred,
    policy_loss,
    qwen2,
    ragged,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

from components.models.loading import load_policy, without_progress_bars
from components.models.size import model_size
from components.train.config import TrainConfig
from components.train.opening import open_engine
from plugins.plan.memory import training as planned_training

# Shapes of the models whose memory is measured: 1.5 and 7.6 billion parameters.
SHAPES = {
    "1.5B": qwen2(151_936, 1536, 8960, layers=28, heads=12, spread=0.02),
    "7B": qwen2(152_064, 3584, 18_944, layers=28, heads=28, spread=0.02, key_heads=4, tied=False),
}


def memory(setting: Setting, shape: str) -> Iterator[Row]:
    """Train a large model for two steps on one sequence. Compare its memory with the plan."""
    folder = setting.folder / shape
    save_random(folder, SHAPES[shape] if setting.on_gpu else TINY, setting.device)
    size = model_size(str(folder))
    # Measured before the model is loaded: the CUDA context is no part of torch's count.
    context = used_memory()
    policy: Any = load_policy(folder, gradient_checkpointing=True, packing=True, empty=True)
    config = TrainConfig(engine="fsdp", zero_stage=3, precision="bf16", packing=True, gradient_checkpointing=True)
    trained = open_engine(policy, config)
    # The files of several large models would fill the disk.
    shutil.rmtree(folder)
    for tokens in (16_384, 32_768):
        batch = ragged([tokens if setting.on_gpu else 64], setting.large.vocab_size)
        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        # AdamW allocates its states in the first step, so the second one has the peak.
        for _ in range(2):
            trained.train_step(batch, policy_loss)
        tensors, held = peak_bytes()
        taken = context + held
        planned = planned_training(size, config, 1, tokens=tokens, gpu=setting.on_gpu).total
        yield inferred(
            f"memory: {shape}, one sequence of {tokens} tokens",
            f"{taken / 1e9:.1f} GB, {tensors / 1e9:.1f} GB of them in tensors; planned {planned / 1e9:.1f} GB",
            "the plan within 10 %",
            not setting.on_gpu or abs(planned / taken - 1) < 0.1,
        )


def save_random(folder: Path, config: Qwen2Config, device: str) -> None:
    """Write a model of random weights in bfloat16."""
    with torch.device(device):
        policy: Any = Qwen2ForCausalLM(config).bfloat16()
    with without_progress_bars():
        policy.save_pretrained(folder)
    del policy
    if device == "cuda":
        torch.cuda.empty_cache()


def used_memory() -> int:
    """Return the used bytes of the GPU outside of torch's allocator, or 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def peak_bytes() -> tuple[int, int]:
    """Return the peak bytes of tensors, and of torch's allocator."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

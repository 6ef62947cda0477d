"""Configurations of the engines, without torch: recipes embed these classes in their own `config.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

ENGINES = ("deepspeed", "fsdp")
PRECISIONS = ("fp32", "bf16", "auto")
SCHEDULERS = ("constant", "linear", "cosine_with_min_lr")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a model is trained, as a user chooses it: engine, optimizer, schedule, memory."""

    engine: str = "deepspeed"
    """Who partitions the training over the ranks: "deepspeed", or "fsdp" (torch's fully_shard)."""
    zero_stage: int = 0
    """What is partitioned over the ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 all. fsdp partitions all
    between optimizer steps: with 3 within a step too, with 2 parameters and gradients are whole there."""
    precision: str = "fp32"
    """"fp32"; "bf16": bfloat16 parameters with float32 master weights; or "auto": bf16 where there is a GPU."""
    learning_rate: float = 1e-6
    """Peak step size of AdamW. 0 leaves the weights as they are."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay per optimizer step of AdamW's first and second moments."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: float = 0.0
    """Decoupled decay per step, in units of the learning rate. Vectors (norms, biases) are exempt."""
    max_norm: float = 1.0
    """Gradients whose global 2-norm is larger are scaled down to it. 0 = no clipping, only measuring."""
    lr_scheduler: str = "constant"
    """What follows the warm-up: "constant", "linear" (down to min_lr_ratio) or "cosine_with_min_lr"."""
    lr_warmup_ratio: float = 0.0
    """Share of the run's optimizer steps in which the learning rate rises linearly from 0."""
    min_lr_ratio: float = 0.0
    """Where the decay ends, as a share of learning_rate. Unused by "constant"."""
    max_tokens: int = 16384
    """Tokens of a micro-batch with its padding; a longer sequence stands alone. Changes no results."""
    forward_max_tokens: int = 0
    """`max_tokens` of passes without gradients, which need less memory. 0: as in training."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    adam_offload: bool = False
    """Keep the optimizer states in host memory (fsdp: weights and gradients too). Needs zero_stage 1, 2 or 3."""
    overlap_comm: bool = False
    """Reduce gradients while the backward pass still runs. Costs buffers; of no use on CPU. fsdp always does."""
    ema_beta: float | None = None
    """Decay per optimizer step of an average of the weights, which save_hf writes instead of the weights themselves.
    It takes 4 bytes per weight of rank 0's host memory. None: no average."""

    def __post_init__(self) -> None:
        _require(self.engine in ENGINES, "engine", self.engine, f"use one of {', '.join(ENGINES)}")
        _require(self.zero_stage in (0, 1, 2, 3), "zero_stage", self.zero_stage, "use 0, 1, 2 or 3")
        _require(self.precision in PRECISIONS, "precision", self.precision, f"use one of {', '.join(PRECISIONS)}")
        _require(self.learning_rate >= 0, "learning_rate", self.learning_rate, "use 0 or more")
        betas_fit = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _require(betas_fit, "betas", self.betas, "use two numbers in [0, 1)")
        _require(self.eps > 0, "eps", self.eps, "use a positive number")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "use 0 or more")
        _require(self.max_norm >= 0, "max_norm", self.max_norm, "use 0 (no clipping) or more")
        _require(self.lr_scheduler in SCHEDULERS, "lr_scheduler", self.lr_scheduler, f"use {SCHEDULERS}")
        is_share = 0 <= self.lr_warmup_ratio <= 1
        _require(is_share, "lr_warmup_ratio", self.lr_warmup_ratio, "use a share in [0, 1]")
        _require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "use a share in [0, 1]")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "use 1 or more")
        forward = self.forward_max_tokens
        _require(forward >= 0, "forward_max_tokens", forward, "use 0 (as in training) or more")
        ema_fits = self.ema_beta is None or 0 <= self.ema_beta < 1
        _require(ema_fits, "ema_beta", self.ema_beta, "use a number in [0, 1), or None (no average)")
        if self.adam_offload and self.zero_stage == 0:
            raise ValueError("adam_offload=True works on partitioned optimizer states; set zero_stage to 1, 2 or 3")
        if self.engine == "fsdp":
            stage = self.zero_stage
            _require(stage >= 2, "zero_stage", stage, "engine='fsdp' partitions all between steps; use 2 or 3")
            remedy = "engine='fsdp' overlaps always, and nobody can choose; leave it False"
            _require(not self.overlap_comm, "overlap_comm", self.overlap_comm, remedy)

    def for_run(self, total_steps: int, seed: int) -> TrainConfig:
        """The engine's configuration in a run of so many optimizer steps, with that seed."""
        own = {option.name: getattr(self, option.name) for option in fields(TrainOptions)}
        return TrainConfig(**own, total_steps=total_steps, seed=seed)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """What a training engine is made with: the options, and what a recipe knows of its run."""

    total_steps: int = 0
    """Optimizer steps of the whole run, where the schedule ends. 0 = unknown: no warm-up, no decay."""
    max_sequences: int = 0
    """Sequences of a micro-batch, at most; 0 sets no limit. Changes no results."""
    forward_max_sequences: int = 0
    """`max_sequences` of passes without gradients. 0: as in training."""
    seed: int = 42
    """Seeds this process's torch generator (dropout) when the engine starts; the rank is added."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.precision != "auto", "precision", self.precision, 'an engine is told "fp32" or "bf16"')
        _require(self.total_steps >= 0, "total_steps", self.total_steps, "use 0 or more")
        _require(self.max_sequences >= 0, "max_sequences", self.max_sequences, "use 0 (no limit) or more")
        limit = self.forward_max_sequences
        _require(limit >= 0, "forward_max_sequences", limit, "use 0 (as in training) or more")
        if self.total_steps == 0 and (self.lr_scheduler != "constant" or self.lr_warmup_ratio > 0):
            raise ValueError(
                f"lr_scheduler={self.lr_scheduler!r} with lr_warmup_ratio={self.lr_warmup_ratio} needs "
                'the length of the run; set total_steps, or lr_scheduler="constant" and lr_warmup_ratio=0'
            )

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0; constant beyond total_steps."""
        warmup_steps = math.ceil(self.total_steps * self.lr_warmup_ratio)
        if step < warmup_steps:
            return self.learning_rate * (step + 1) / warmup_steps
        if self.lr_scheduler == "constant":
            return self.learning_rate
        progress = min(1.0, (step - warmup_steps) / max(1, self.total_steps - warmup_steps))
        remaining = 1 - progress if self.lr_scheduler == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * remaining)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How completions are drawn. Tokens depend on these fields, the prompt and its ids, on nothing else."""

    temperature: float = 1.0
    """Logits are divided by it. 0 = the likeliest token, with its log-probability at temperature 1."""
    max_new_tokens: int = 16
    """Completions are cut after so many tokens, the end token included."""
    seed: int = 42
    """The run's seed."""
    step: int = 0
    """The generation step; another step draws other numbers for the same prompt."""

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "temperature", self.temperature, "use 0 (greedy) or more")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "use 1 or more")


@dataclass(frozen=True, kw_only=True)
class HFRolloutConfig:
    """The generation loop over a transformers model."""

    dtype: str = "float32"
    """Of weights and cache: "float32" or "bfloat16". Log-probabilities are float32 in either case."""
    max_rows: int = 512
    """Sequences generated at the same time. Changes memory and speed, not tokens."""

    def __post_init__(self) -> None:
        _require(self.dtype in ("float32", "bfloat16"), "dtype", self.dtype, 'use "float32" or "bfloat16"')
        _require(self.max_rows >= 1, "max_rows", self.max_rows, "use 1 or more")


def _require(fits: bool, field: str, value: object, remedy: str) -> None:
    if not fits:
        raise ValueError(f"{field}={value!r} is not possible; {remedy}")

"""Configurations of training engines, without torch: recipes embed these classes in their own `config.py`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated

from components import registry
from components.ranges import (
    Checked,
    Count,
    CountFromZero,
    NameOf,
    NotNegative,
    OneOf,
    Positive,
    Share,
    ShareBelowOne,
)
from components.registry import names

CHOSEN_PRECISIONS = ("fp32", "bf16", "bf16_autocast")
PRECISIONS = (*CHOSEN_PRECISIONS, "auto")
LAYOUTS = ("whole", "sharded", "offloaded")
SCHEDULERS = ("constant", "linear", "cosine_with_min_lr")
WITH_ADAPTERS = {"lora_rank": True}
"""Of an option that has an effect only where that one is set."""

AXES = ("context", "tensor", "expert")
"""Axes of ranks beside data that share a model; a plug-in provides each."""


def weight_type(precision: str) -> str:
    """Name of the type of a model's weights, as `load_policy` takes it, where it computes in this precision and is not
    trained.
    """
    return "bfloat16" if precision == "bf16" else "float32"


def product_type(precision: str) -> str:
    """Name of the type of matrix products."""
    return "float32" if precision == "fp32" else "bfloat16"


def default_engine() -> str:
    """Return the training engine where none is named: DeepSpeed if its plug-in and the library are installed, else
    fsdp.
    """
    has_plugin = "deepspeed" in names("train engine")
    return "deepspeed" if has_plugin and importlib.util.find_spec("deepspeed") is not None else "fsdp"


def choose_precision(precision: str, gpus: int) -> str:
    """Return the precision to train in: that of the option, or bf16 on GPUs and fp32 on CPUs in place of `auto`."""
    if precision == "auto":
        return "bf16" if gpus else "fp32"
    return precision


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Checked):
    """How a model is trained, as a user chooses it: engine, optimizer, schedule, memory."""

    engine: Annotated[str, NameOf("train engine", ("fsdp",))] = field(default_factory=default_engine)
    """Who partitions the training over the ranks: "deepspeed", or "fsdp" (torch's fully_shard)."""
    zero_stage: Annotated[int, OneOf((0, 1, 2, 3))] = 0
    """What is partitioned over the ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 all. fsdp partitions all
    between optimizer steps: with 3 within a step too, with 2 parameters and gradients are whole there."""
    precision: Annotated[str, OneOf(PRECISIONS)] = "fp32"
    """"fp32"; "bf16": bfloat16 parameters with float32 master weights; "bf16_autocast": float32 parameters, and matrix
    products in bfloat16; or "auto": bf16 where there is a GPU."""
    learning_rate: NotNegative = 1e-6
    """Peak step size of AdamW. 0 leaves the weights as they are."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay per optimizer step of AdamW's first and second moments."""
    eps: Positive = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: NotNegative = 0.0
    """Decoupled decay per step, in units of the learning rate. Vectors (norms, biases) are exempt."""
    weight_decay_all: bool = False
    """Vectors decay too."""
    max_grad_norm: NotNegative = 1.0
    """Gradients whose global 2-norm is larger are scaled down to it. 0 = no clipping, only measuring."""
    lr_scheduler: Annotated[str, OneOf(SCHEDULERS)] = "constant"
    """What follows the warm-up: "constant", "linear" (down to min_lr_ratio) or "cosine_with_min_lr"."""
    lr_warmup_ratio: Share = 0.0
    """Share of the run's optimizer steps in which the learning rate rises linearly from 0."""
    lr_warmup_from_zero: bool = False
    """The first of these has a learning rate of 0, as in transformers, and moves nothing."""
    min_lr_ratio: Share = 0.0
    """Where the decay ends, as a share of learning_rate. Unused by "constant"."""
    max_tokens: Count = 16384
    """Tokens of a micro-batch with its padding; a longer sequence stands alone. Changes no results."""
    forward_max_tokens: CountFromZero = 0
    """`max_tokens` of passes without gradients, which need less memory. 0: as in training."""
    packing: bool | None = None
    """Lay the sequences of a micro-batch end to end instead of padding them, and compute what they begin with alike, as
    the prompt of a group, once; attention stays within each. Changes no results but for rounding. Default: where the
    model can."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    lora_rank: CountFromZero = 0
    """Train low-rank adapters of this rank (peft) instead of the weights, which stay as they are. 0: train all."""
    lora_alpha: Positive = field(default=16.0, metadata=WITH_ADAPTERS)
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_dropout: ShareBelowOne = field(default=0.0, metadata=WITH_ADAPTERS)
    """Share of an adapter's inputs that is dropped in training."""
    lora_target_modules: str = field(default="all-linear", metadata=WITH_ADAPTERS)
    """Which layers get an adapter: names or endings with commas between, or `all-linear`: every one but the head."""
    lora_path: str = ""
    """Folder of adapters that peft has written, with which training begins. Rank, alpha and layers are theirs. Default:
    new adapters, which change nothing at first."""
    router_aux_loss_coef: NotNegative = 0.0
    """Weight of the load-balancing loss of a mixture of experts, of each micro-batch. No effect on other models."""
    adam_offload: bool = False
    """Keep the optimizer states in host memory (fsdp: weights and gradients too). Needs zero_stage 1, 2 or 3."""
    overlap_comm: bool = False
    """Reduce gradients while the backward pass still runs. Costs buffers; of no use on CPU. fsdp always does."""
    ema_beta: ShareBelowOne | None = None
    """Decay per optimizer step of an average of the weights, which save_hf writes instead of the weights themselves.
    It takes 4 bytes per weight of rank 0's host memory. None: no average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for fault in [*self.read_adapters(), *self.faults()]:
            raise ValueError(fault)

    def read_adapters(self, prefix: str = "") -> Iterator[str]:
        """Take over the settings of the adapters at `lora_path`; faults of those that are given otherwise."""
        if not self.lora_path:
            return
        if missing := _missing("adapter settings", "lora", f"{prefix}lora_path={self.lora_path}"):
            yield missing
            return
        try:
            settings = registry.load("adapter settings", "lora")(self.lora_path)
        except ValueError as error:
            yield f"{prefix}{error}"
            return
        usual = {option.name: option.default for option in fields(TrainOptions)}
        for name, value in settings.items():
            given = getattr(self, name)
            if given not in (usual[name], value):
                there = f"the adapters at {prefix}lora_path={self.lora_path} have {value}"
                yield f"{prefix}{name}={given}, and {there}; leave it out"
            object.__setattr__(self, name, value)

    def faults(self, prefix: str = "") -> Iterator[str]:
        """What cannot work besides numbers that are out of range; each begins with an option, behind a prefix."""
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            yield f"{prefix}betas={self.betas}; set two numbers from 0 to below 1"
        if self.lora_rank and (missing := _missing("adapters", "lora", f"{prefix}lora_rank={self.lora_rank}")):
            yield missing
        elif self.lora_rank and importlib.util.find_spec("peft") is None:
            yield f"{prefix}lora_rank={self.lora_rank} needs peft; run `bash scripts/setup.sh lora`, or set it to 0"
        coefficient = self.router_aux_loss_coef
        if coefficient and (
            missing := _missing("auxiliary loss", "router", f"{prefix}router_aux_loss_coef={coefficient}")
        ):
            yield missing
        if not self.lora_target_modules.strip(", "):
            yield f"{prefix}lora_target_modules is empty; name layers, or all-linear"
        if self.adam_offload and self.zero_stage == 0:
            yield f"{prefix}adam_offload=True works on partitioned optimizer states; set zero_stage to 1, 2 or 3"
        # Without DeepSpeed there is no other engine: lower stages, as demonstrations set them, count as 2.
        if self.engine == "fsdp" and self.zero_stage < 2 and default_engine() != "fsdp":
            yield f"{prefix}zero_stage={self.zero_stage}: engine=fsdp partitions all between steps; set 2 or 3"
        if self.engine == "fsdp" and self.overlap_comm:
            yield f"{prefix}overlap_comm=True: engine=fsdp overlaps always, and nobody can choose; leave it out"

    @property
    def stage(self) -> int:
        """`zero_stage` as it is used: fsdp has none below 2, and without ZeRO, DeepSpeed trains bfloat16 with a loss
        scale of its own.
        """
        if self.engine == "fsdp":
            return max(self.zero_stage, 2)
        return max(self.zero_stage, 1) if self.precision == "bf16" else self.zero_stage

    def for_run(self, total_steps: int, seed: int) -> TrainConfig:
        """The engine's configuration in a run of so many optimizer steps, with that seed."""
        own = {option.name: getattr(self, option.name) for option in fields(TrainOptions)}
        return TrainConfig(**own, total_steps=total_steps, seed=seed)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """What a training engine is made with: the options, and what a recipe knows of its run."""

    precision: Annotated[str, OneOf(CHOSEN_PRECISIONS)] = "fp32"
    total_steps: CountFromZero = 0
    """Optimizer steps of the whole run, where the schedule ends. 0 = unknown: no warm-up, no decay."""
    steps_per_rate: Count = 1
    """Optimizer steps in a row with the same learning rate, which a schedule counts as one."""
    max_sequences: CountFromZero = 0
    """Sequences of a micro-batch, at most; 0 sets no limit. Changes no results."""
    forward_max_sequences: CountFromZero = 0
    """`max_sequences` of passes without gradients. 0: as in training."""
    seed: int = 42
    """Seeds this process's torch generator (dropout) when the engine starts; the rank is added."""
    context: Count = 1
    """Ranks that share each sequence, of which one computes a stretch of its tokens."""
    tensor: Count = 1
    """Ranks that share each layer, of which one has a part of its matrices."""
    expert: Count = 1
    """Ranks that share the experts of each layer."""

    def faults(self, prefix: str = "") -> Iterator[str]:
        """See `TrainOptions.faults`."""
        yield from super().faults(prefix)
        yield from parallel_faults(self, context=self.context, tensor=self.tensor, expert=self.expert)
        if self.total_steps == 0 and (self.lr_scheduler != "constant" or self.lr_warmup_ratio > 0):
            yield (
                f"lr_scheduler={self.lr_scheduler!r} with lr_warmup_ratio={self.lr_warmup_ratio} needs "
                'the length of the run; set total_steps, or lr_scheduler="constant" and lr_warmup_ratio=0'
            )

    def data_ranks(self, ranks: int) -> int:
        """So many of the ranks, or groups of ranks that compute together, have sequences of their own.

        Raises:
            ValueError: they cannot be shared out.
        """
        axes = {"context": self.context, "tensor": self.tensor}
        together = math.prod(axes.values())
        if ranks % together:
            given = " x ".join(f"parallel.{axis}={size}" for axis, size in axes.items() if size > 1)
            raise ValueError(
                f"{given} does not divide {ranks} ranks; set a divisor, or another number of ranks (placement)"
            )
        if ranks % self.expert:
            raise ValueError(
                f"parallel.expert={self.expert} does not divide {ranks} ranks; set a divisor, or another number of "
                "ranks (placement)"
            )
        return ranks // together

    @property
    def forward_limits(self) -> PassLimits:
        """Of passes without gradients."""
        return PassLimits(
            max_tokens=self.forward_max_tokens or self.max_tokens,
            max_sequences=self.forward_max_sequences or self.max_sequences,
        )

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0; constant beyond total_steps."""
        step //= self.steps_per_rate
        total_steps = self.total_steps // self.steps_per_rate
        warmup_steps = math.ceil(total_steps * self.lr_warmup_ratio)
        if step < warmup_steps:
            return self.learning_rate * (step + (not self.lr_warmup_from_zero)) / warmup_steps
        if self.lr_scheduler == "constant":
            return self.learning_rate
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        remaining = 1 - progress if self.lr_scheduler == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * remaining)


def parallel_faults(train: TrainOptions, *, context: int, tensor: int, expert: int) -> Iterator[str]:
    """Why a model cannot be trained so on several axes of ranks.

    Args:
        train: its options.
        context: ranks that share each sequence.
        tensor: ranks that share each layer.
        expert: ranks that share the experts of a layer.
    """
    for axis, size in zip(AXES, (context, tensor, expert), strict=True):
        if size > 1 and (missing := _missing("parallelism", axis, f"parallel.{axis}={size}")):
            yield missing
        if size > 1 and train.engine != "fsdp":
            yield (
                f"parallel.{axis}={size} needs engine=fsdp, and engine={train.engine} has one axis of ranks: its ZeRO "
                "partitions over all that it averages over; set train.engine=fsdp, with train.zero_stage 2 or 3"
            )
    if context > 1:
        yield from _context_faults(train, f"parallel.context={context}")
    if tensor > 1 and train.lora_rank:
        yield (
            f"parallel.tensor={tensor} cuts the matrices that adapters stand in front of, and lora_rank="
            f"{train.lora_rank} trains adapters; set one of them to its default"
        )
    if expert > 1 and train.lora_rank:
        yield (
            f"parallel.expert={expert} shares out experts that are trained, and lora_rank={train.lora_rank} trains "
            "adapters, and experts can have none; set one of them to its default"
        )
    if tensor > 1 and expert > 1:
        yield (
            f"parallel.tensor={tensor} cuts every matrix, those of experts too, which parallel.expert={expert} leaves "
            "whole; set one of them to 1"
        )


def _missing(kind: str, name: str, option: str) -> str:
    """Return the fault of an option whose plug-in is missing; empty if it is there."""
    if name in registry.names(kind):
        return ""
    return f"{option}: no plug-in in plugins/ or among the installed packages provides the {kind} `{name}`"


def _context_faults(train: TrainOptions, given: str) -> Iterator[str]:
    if train.packing is False:
        yield f"{given} cuts packed rows, and packing=False pads sequences; leave train.packing out"
    if train.router_aux_loss_coef:
        yield (
            f"{given} shows each rank the routing of its stretch alone, and router_aux_loss_coef="
            f"{train.router_aux_loss_coef} balances over whole sequences; set one of them to its default"
        )


@dataclass(frozen=True, kw_only=True)
class PassLimits:
    """Of a micro-batch in a pass without gradients."""

    max_tokens: int = 16384
    """Tokens with their padding; a longer sequence stands alone."""
    max_sequences: int = 0
    """Sequences; 0 sets no limit."""


@dataclass(frozen=True, kw_only=True)
class FrozenConfig(Checked):
    """A model that is evaluated and never trained."""

    precision: Annotated[str, OneOf(CHOSEN_PRECISIONS)] = "fp32"
    """"fp32", "bf16" or "bf16_autocast", as of the model that it is compared with."""
    limits: PassLimits = PassLimits()
    packing: bool | None = False
    """As `load_policy` takes it."""
    layout: Annotated[str, OneOf(LAYOUTS)] = "whole"
    """"whole" on its device; "sharded" over the ranks, which gather a layer for each pass over it; or "offloaded":
    sharded, and what a rank keeps is in host memory."""

    @property
    def is_collective(self) -> bool:
        """Whether passes gather parameters, so that every rank has to make them."""
        return self.layout != "whole"

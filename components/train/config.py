"""Configurations of training engines, without torch: recipes embed these classes in their own `config.py`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated

from components import registry
from components.ranges import Checked, Count, CountFromZero, NameOf, NotNegative, OneOf, Positive, Share, ShareBelowOne
from components.registry import names

CHOSEN_PRECISIONS = ("fp32", "bf16", "bf16_autocast")
PRECISIONS = (*CHOSEN_PRECISIONS, "auto")
LAYOUTS = ("whole", "sharded", "offloaded")
SCHEDULERS = ("constant", "linear", "cosine_with_min_lr")
WITH_ADAPTERS = {"lora_rank": True}
"""Metadata of the options that have an effect only if `lora_rank` is set."""

_PROVIDERS = {
    "lora_rank": ("adapters", "lora"),
    "router_aux_loss_coef": ("auxiliary loss", "router"),
    "ema_beta": ("weight average", "ema"),
    "kernels": ("training kernels", "model"),
}
"""Options that need an object of a plug-in unless they have their default, with the kind and the name of the object."""
AXES = ("context", "tensor", "expert")
"""Axes of ranks beside data that share a model; a plug-in provides each."""


def weight_type(precision: str) -> str:
    """Return the dtype of the weights of a model that computes in this precision and is not trained, as the name that
    `load_policy` takes.
    """
    return "bfloat16" if precision == "bf16" else "float32"


def product_type(precision: str) -> str:
    """Return the name of the dtype in which matrix products are computed."""
    return "float32" if precision == "fp32" else "bfloat16"


def default_engine() -> str:
    """Return the name of the default training engine: "deepspeed" if its plug-in and the library are installed, else
    "fsdp".
    """
    has_plugin = "deepspeed" in names("train engine")
    return "deepspeed" if has_plugin and importlib.util.find_spec("deepspeed") is not None else "fsdp"


def choose_precision(precision: str, gpus: int) -> str:
    """Return the training precision. `auto` is resolved to bf16 on GPUs and to fp32 on CPUs."""
    if precision == "auto":
        return "bf16" if gpus else "fp32"
    return precision


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Checked):
    """Options of the training of a model: engine, optimizer, learning-rate schedule and memory."""

    engine: Annotated[str, NameOf("train engine")] = field(default_factory=default_engine)
    """Training engine that shards the model over the ranks: "deepspeed", or "fsdp" (torch's fully_shard)."""
    zero_stage: Annotated[int, OneOf((0, 1, 2, 3))] | None = None
    """ZeRO stage, which sets the tensors that are sharded over the ranks. 0: none; 1: optimizer states; 2: gradients
    too; 3: parameters too. fsdp needs 2 or 3 and always shards everything between optimizer steps. Within a step, 3
    keeps parameters and gradients sharded and 2 keeps them whole. Default: on GPUs the lowest stage that fits in
    memory, on CPUs 0."""
    precision: Annotated[str, OneOf(PRECISIONS)] = "fp32"
    """Precision of training. "fp32"; "bf16": bfloat16 parameters with float32 master weights; "bf16_autocast": float32
    parameters with matrix products in bfloat16; "auto": bf16 on GPUs, fp32 on CPUs."""
    learning_rate: NotNegative = 1e-6
    """Peak learning rate of AdamW. 0 leaves the weights unchanged."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas: the decay of the first and the second moment per optimizer step."""
    eps: Positive = 1e-8
    """AdamW's epsilon, which is added to the square root of the second moment."""
    weight_decay: NotNegative = 0.0
    """AdamW's weight decay per step, which is multiplied by the learning rate. Vectors (norms, biases) are exempt."""
    weight_decay_all: bool = False
    """Apply weight decay to vectors (norms, biases) too."""
    max_grad_norm: NotNegative = 1.0
    """Maximum global 2-norm of the gradients; larger gradients are scaled down to it. 0 = the norm is measured and
    nothing is clipped."""
    lr_scheduler: Annotated[str, OneOf(SCHEDULERS)] = "constant"
    """Learning-rate schedule after the warm-up: "constant", "linear" (down to min_lr_ratio) or
    "cosine_with_min_lr"."""
    lr_warmup_ratio: Share = 0.0
    """Share of the run's optimizer steps that are warm-up, in which the learning rate rises linearly from 0."""
    lr_warmup_from_zero: bool = False
    """Begin the warm-up with a learning rate of exactly 0, as transformers does. The first step then changes no
    weight."""
    min_lr_ratio: Share = 0.0
    """Final learning rate of the schedule, as a share of learning_rate. Unused by "constant"."""
    max_tokens: Count | None = None
    """Maximum number of tokens of a micro-batch, with its padding. A longer sequence is a micro-batch of its own.
    Changes no results. Default: on GPUs the largest number that fits in memory, up to 32768; on CPUs 16384."""
    forward_max_tokens: CountFromZero = 0
    """`max_tokens` of forward passes without gradients, which need less memory. 0: the value of `max_tokens`."""
    packing: bool | None = None
    """Concatenate the sequences of a micro-batch instead of padding them, and compute a common prefix, such as the
    prompt of a group, once. Attention stays within each sequence. Changes results only by rounding. Default: enabled
    for models that support it."""
    kernels: Annotated[str, OneOf(("plain", "auto", "fused"))] = "plain"
    """Kernels of the training pass. "plain": those of torch and transformers. "fused": Triton kernels for the output
    layer, norms, rotary embeddings and gated activations, which read and write less memory and change results only by
    rounding. "auto": fused on GPUs for supported models. No GPU has run the fused kernels yet."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of storing them. Saves memory, and costs about a fifth of the
    training time. Default: enabled on GPUs if the activations do not fit in memory."""
    lora_rank: CountFromZero = 0
    """Rank of the low-rank adapters (peft) that are trained instead of the weights, which are frozen. 0: train all
    weights."""
    lora_alpha: Positive = field(default=16.0, metadata=WITH_ADAPTERS)
    """LoRA's alpha: the output of an adapter is scaled by lora_alpha / lora_rank."""
    lora_dropout: ShareBelowOne = field(default=0.0, metadata=WITH_ADAPTERS)
    """Dropout probability of an adapter's inputs in training."""
    lora_target_modules: str = field(default="all-linear", metadata=WITH_ADAPTERS)
    """Layers that get an adapter: a comma-separated list of names or name endings, or `all-linear` for all linear
    layers except the output layer."""
    lora_path: str = ""
    """Path to a folder of adapters written by peft, from which training starts. Rank, alpha and layers are read from
    it. Default: new adapters, which do not change the model's outputs at first."""
    router_aux_loss_coef: NotNegative = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts, over all tokens of an optimizer step. If the step
    has several micro-batches, one more forward pass counts the tokens of each expert. No effect on other models."""
    adam_offload: bool = False
    """Keep the optimizer states in host memory. fsdp keeps weights and gradients there too. Needs zero_stage 1, 2 or
    3."""
    overlap_comm: bool = False
    """Overlap the reduction of gradients with the backward pass. Takes memory for buffers and gains nothing on CPUs.
    fsdp always overlaps."""
    log_utilisation: bool = True
    """On GPUs, log model FLOPs utilisation (MFU), tokens per second and GPU, and power."""
    ema_beta: ShareBelowOne | None = None
    """Decay per optimizer step of an exponential moving average of the weights, which save_hf writes instead of the
    weights. It takes 4 bytes of rank 0's host memory per weight. None: no average is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # One exception can carry a single fault. The command line calls `faults` itself and prints all of them.
        for fault in [*self.read_adapters(), *self.faults()]:
            raise ValueError(fault)

    def read_adapters(self, prefix: str = "") -> Iterator[str]:
        """Set the adapter options from the files at `lora_path`. Yield a message for each option that contradicts
        them.
        """
        if not self.lora_path:
            return
        if missing := _missing("adapter settings", "lora", f"{prefix}lora_path={self.lora_path}"):
            yield missing
            return
        yield from registry.load("adapter settings", "lora")(self, prefix)

    def faults(self, prefix: str = "") -> Iterator[str]:
        """Yield a message for each invalid combination of options. Ranges of single values are checked elsewhere.

        Args:
            prefix: text before the name of the option with which each message begins.
        """
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            yield f"{prefix}betas={self.betas}; set two numbers from 0 to below 1"
        for option, provider in _PROVIDERS.items():
            value = getattr(self, option)
            if value != getattr(TrainOptions, option):
                yield from filter(None, [_missing(*provider, f"{prefix}{option}={value}")])
        if self.lora_rank and "lora" in names("adapters") and importlib.util.find_spec("peft") is None:
            yield f"{prefix}lora_rank={self.lora_rank} needs peft; run `bash scripts/setup.sh lora`, or set it to 0"
        if not self.lora_target_modules.strip(", "):
            yield f"{prefix}lora_target_modules is empty; name layers, or all-linear"
        if self.adam_offload and self.zero_stage == 0:
            yield f"{prefix}adam_offload=True works on partitioned optimizer states; set zero_stage to 1, 2 or 3"
        # Demonstrations set lower stages. Without DeepSpeed fsdp is the only engine, so a lower stage counts as 2
        # there instead of ending the run.
        if self.engine == "fsdp" and self.zero_stage in (0, 1) and default_engine() != "fsdp":
            yield f"{prefix}zero_stage={self.zero_stage}: engine=fsdp partitions all between steps; set 2 or 3"
        if self.engine == "fsdp" and self.overlap_comm:
            yield f"{prefix}overlap_comm=True: engine=fsdp overlaps always, and nobody can choose; leave it out"

    @property
    def stage(self) -> int:
        """Effective ZeRO stage: at least 2 with fsdp and at least 1 with bf16. Without ZeRO, DeepSpeed would train
        bfloat16 with its own loss scaling.
        """
        least = 2 if self.engine == "fsdp" else int(self.precision == "bf16")
        return max(self.zero_stage or 0, least)

    def for_run(self, total_steps: int, seed: int) -> TrainConfig:
        """Return the engine's configuration for a run of `total_steps` optimizer steps."""
        options = {option.name: getattr(self, option.name) for option in fields(TrainOptions)}
        # None is an option that was left to the machine and not resolved. The engine then takes its own default.
        options = {name: value for name, value in options.items() if value is not None}
        return TrainConfig(**options, total_steps=total_steps, seed=seed)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """Configuration of a training engine: the options, and the facts of a run that its recipe sets."""

    precision: Annotated[str, OneOf(CHOSEN_PRECISIONS)] = "fp32"
    zero_stage: Annotated[int, OneOf((0, 1, 2, 3))] = 0
    max_tokens: Count = 16384
    gradient_checkpointing: bool = False
    total_steps: CountFromZero = 0
    """Number of optimizer steps of the run, at which the schedule ends. 0 = unknown: no warm-up, no decay."""
    steps_per_rate: Count = 1
    """Number of consecutive optimizer steps with the same learning rate. The schedule counts them as one."""
    max_sequences: CountFromZero = 0
    """Maximum number of sequences of a micro-batch. 0 sets no limit. Changes no results."""
    forward_max_sequences: CountFromZero = 0
    """`max_sequences` of forward passes without gradients. 0: the value of `max_sequences`."""
    seed: int = 42
    """Seed of this process's torch generator (dropout), which is set when the engine starts. The rank is added to
    it."""
    context: Count = 1
    """Context-parallel degree: number of ranks over which the tokens of each sequence are split."""
    tensor: Count = 1
    """Tensor-parallel degree: number of ranks over which the matrices of each layer are split."""
    expert: Count = 1
    """Expert-parallel degree: number of ranks over which the experts of each layer are spread."""

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
        """Return the data-parallel degree: the number of ranks, or of groups of ranks that compute together, with
        sequences of their own.

        Raises:
            ValueError: the parallel degrees do not divide the number of ranks.
        """
        if self.context == self.tensor == self.expert == 1:
            return ranks
        return registry.load("parallelism check", "ranks", "parallel")(self, ranks)

    @property
    def forward_limits(self) -> PassLimits:
        """Limits of a micro-batch in forward passes without gradients."""
        return PassLimits(
            max_tokens=self.forward_max_tokens or self.max_tokens,
            max_sequences=self.forward_max_sequences or self.max_sequences,
        )

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0. It is constant beyond `total_steps`."""
        step //= self.steps_per_rate
        total_steps = self.total_steps // self.steps_per_rate
        warmup_steps = math.ceil(total_steps * self.lr_warmup_ratio)
        if step < warmup_steps:
            # Without `lr_warmup_from_zero` the first step counts as one step of the warm-up. With a rate of 0 it would
            # change no weight.
            return self.learning_rate * (step + (not self.lr_warmup_from_zero)) / warmup_steps
        if self.lr_scheduler == "constant":
            return self.learning_rate
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        remaining = 1 - progress if self.lr_scheduler == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * remaining)


def parallel_faults(train: TrainOptions, **degrees: int) -> Iterator[str]:
    """Yield a message for each reason why a model cannot be trained with these parallel degrees.

    Args:
        train: options of the training.
        degrees: degree of each of `AXES`, by name.
    """
    above = {axis: size for axis, size in degrees.items() if size > 1}
    needed = [("parallelism", axis, f"parallel.{axis}={size}") for axis, size in above.items()]
    needed += [("parallelism check", "options", option) for _, _, option in needed[:1]]
    missing = [message for message in (_missing(*each) for each in needed) if message]
    yield from missing
    if above and not missing:
        yield from registry.load("parallelism check", "options")(train, **degrees)


def _missing(kind: str, name: str, option: str) -> str:
    """Return a message if no plug-in provides `name`, which `option` needs; otherwise an empty string."""
    if name in registry.names(kind):
        return ""
    return f"{option}: no plug-in in plugins/ or among the installed packages provides the {kind} `{name}`"


@dataclass(frozen=True, kw_only=True)
class PassLimits:
    """Limits of a micro-batch in a forward pass without gradients."""

    max_tokens: int = 16384
    """Maximum number of tokens, padding included. A longer sequence is a micro-batch of its own."""
    max_sequences: int = 0
    """Maximum number of sequences. 0 sets no limit."""


@dataclass(frozen=True, kw_only=True)
class FrozenConfig(Checked):
    """Configuration of a model that is evaluated and never trained, such as a reference or reward model."""

    precision: Annotated[str, OneOf(CHOSEN_PRECISIONS)] = "fp32"
    """Precision: "fp32", "bf16" or "bf16_autocast", as for the model that it is compared with."""
    limits: PassLimits = PassLimits()
    packing: bool | None = False
    """Argument `packing` of `load_policy`."""
    layout: Annotated[str, OneOf(LAYOUTS)] = "whole"
    """Placement of the weights. "whole": on the device of each rank; "sharded": over the ranks, which gather each layer
    for a pass; "offloaded": sharded, with each rank's shard in host memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_collective and (missing := _missing("sharding", "fsdp", f"placement.frozen_models={self.layout}")):
            raise ValueError(missing)

    @property
    def is_collective(self) -> bool:
        """True if passes gather parameters, so that every rank has to take part in each pass."""
        return self.layout != "whole"

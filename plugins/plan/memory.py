"""Memory of a model that is trained, evaluated or sampled from, computed before anything is loaded.

Nothing here needs torch. A number that follows neither from the weight files nor from a known architecture is None.
scripts/bench_plan.py compares the numbers with processes on a CPU. Those of GPUs are computed, not measured.

Roles share a device in phases, and its peak is that of the largest phase: responses are generated, then models are
trained and evaluated, then weights are sent to the engines. A model that sleeps takes no memory in the phases of others
(`phases`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from components.generate.config import PagedRolloutConfig, RolloutConfig
from components.models.size import ModelSize
from components.train.config import TrainConfig, product_type, weight_type
from components.train.memory_sizes import CONTEXT_BYTES, ZERO_NUMBERS
from components.weights.bucket_sizes import BUCKET_BYTES
from plugins.plan.communication import sent_bytes
from training.launch.model_use import check_axes

PROCESS_BYTES = {"driver": 250_000_000, "process": 400_000_000, "vllm": 1_100_000_000}
"""Of an interpreter with its libraries, as proportional set size: of the driver, of a process with torch, with vLLM."""
NCCL_BYTES = 1_000_000_000
"""Of a GPU's memory for the buffers of a group of processes. Between 0.5 GB (2 GPUs) and 1.6 GB (8) are reported, see
issues 864 and 964 of NVIDIA/nccl."""
GRAPH_BYTES = 1_000_000_000
"""Of a GPU's memory for vLLM's CUDA graphs: a round number, as users report 0.2 to 1 GB. They stay while an engine
sleeps."""
VLLM_TOKENS = 16384
"""That vLLM reads at a time, at most."""
_REDUCED = 500_000_000
"""Gradients that DeepSpeed reduces at a time with zero_stage 0."""
_WIDTH = {"float32": 4, "bfloat16": 2}
_STATES = {"fp32": 7, "bf16": 9, "bf16_autocast": 14}
"""Of a token's state, what a layer keeps for the backward pass, in numbers of the matrix products' width."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one process of a role in bytes, where it computes: on a GPU, or on the machine if it has none.

    None stands for a number that is not known.
    """

    weights: int | None = 0
    gradients: int | None = 0
    optimizer: int | None = 0
    """Optimizer states, with the float32 master weights."""
    cache: int | None = 0
    """Cache of keys and values."""
    passes: int | None = 0
    """Maximum during a pass besides the above: activations, logits, gathered parameters, gradients in buffers."""
    base: int = PROCESS_BYTES["process"]
    """Interpreter and libraries; on a GPU the context, the buffers of NCCL and CUDA graphs."""
    freed_gradients: int = 0
    """Part of the gradients that exists only during training."""
    host: int = 0
    """Memory of the machine, if the rest is on a GPU: what is offloaded, or sleeps there."""
    loading: int = 0
    """Further memory of the machine while the model is created."""
    first: int = 0
    """Further memory of the machine for rank 0: a moving average."""
    published: int = 0
    """Weights for the engines that sample, in shared memory of the machine, or on disk if that is full."""
    grows: bool = False
    """True if the cache grows up to the longest sequences that are possible, and is not allocated before."""
    sleeps: bool = False
    """True if everything but the base is freed while other roles that share the device work."""
    generates: bool = False
    """True if it works while responses are generated. Other roles work after that."""
    share: int = 0
    """Memory of a GPU that vLLM may take; 0 without vLLM, or if it is not known."""
    short: int = 0
    """Amount by which the share is too small for the weights, one sequence and the buffers of vLLM."""
    sends: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of bytes that are sent to other ranks in an optimizer step, by the axis of the ranks."""
    parts: tuple[MemoryEstimate, ...] = ()
    """Estimates of each use, if one process has several."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are taken in any case, as far as known."""
        parts = [self.weights, self.gradients, self.optimizer, 0 if self.grows else self.cache]
        return sum(part or 0 for part in parts)

    @property
    def transient_bytes(self) -> int:
        """Maximum number of further bytes while it works, as far as known."""
        return (self.passes or 0) + ((self.cache or 0) if self.grows else 0)

    @property
    def total(self) -> int:
        """Maximum number of bytes, as far as known."""
        return self.base + self.fixed_bytes + self.transient_bytes

    @property
    def is_known(self) -> bool:
        """True if no part is unknown."""
        return None not in (self.weights, self.gradients, self.optimizer, self.cache, self.passes)


def together(*estimates: MemoryEstimate) -> MemoryEstimate:
    """Return the memory of one process with several uses, which work one after the other and keep what they hold."""
    sums: dict[str, int | None] = {}
    for name in ("weights", "gradients", "optimizer", "cache"):
        amounts = [getattr(estimate, name) for estimate in estimates]
        sums[name] = None if None in amounts else sum(amounts)
    passes = [estimate.passes for estimate in estimates]
    return MemoryEstimate(
        **sums,
        passes=None if None in passes else max(count or 0 for count in passes),
        base=max(estimate.base for estimate in estimates),
        freed_gradients=sum(estimate.freed_gradients for estimate in estimates),
        host=sum(estimate.host for estimate in estimates),
        loading=max(estimate.loading for estimate in estimates),
        first=sum(estimate.first for estimate in estimates),
        published=sum(estimate.published for estimate in estimates),
        grows=any(estimate.grows for estimate in estimates),
        sleeps=all(estimate.sleeps for estimate in estimates),
        generates=all(estimate.generates for estimate in estimates),
        share=max(estimate.share for estimate in estimates),
        short=max(estimate.short for estimate in estimates),
        sends=sum((Counter(estimate.sends) for estimate in estimates), Counter[str]()),
        parts=tuple(part for estimate in estimates for part in estimate.parts or (estimate,)),
    )


@dataclass(frozen=True)
class Phase:
    """Memory of one device at the same time, without contexts."""

    name: str
    fixed_bytes: int
    """Bytes that are taken in any case."""
    transient_bytes: int
    """Maximum number of further bytes: of roles that work one after the other the largest."""

    @property
    def most(self) -> int:
        """Maximum number of bytes."""
        return self.fixed_bytes + self.transient_bytes


def phases(estimates: Iterable[MemoryEstimate]) -> list[Phase]:
    """Return the phases of a step, in their order, on a device that processes with these estimates share."""
    parts = [part for estimate in estimates for part in estimate.parts or (estimate,)]
    engines = [part for part in parts if part.generates]
    others = [part for part in parts if not part.generates]
    found = list[Phase]()
    if engines:
        idle = sum(part.fixed_bytes - part.freed_gradients for part in others if not part.sleeps)
        generating = idle + sum(part.fixed_bytes for part in engines)
        found.append(Phase("generation", generating, max(part.transient_bytes for part in engines)))
    if others:
        awake = sum(part.fixed_bytes for part in parts if not (part.sleeps and part.generates))
        name = "training" if engines else "work"
        found.append(Phase(name, awake, max(part.transient_bytes for part in others)))
    if engines and any(part.published for part in others):
        # Engines that sleep receive their weights before they allocate a cache.
        woken = sum((part.weights or 0) if part.sleeps else part.fixed_bytes for part in engines)
        trained = sum(part.fixed_bytes - part.freed_gradients for part in others)
        found.append(Phase("weight sync", trained + woken, 2 * BUCKET_BYTES["cuda"]))
    return found


def learning(
    size: ModelSize | None, config: TrainConfig, ranks: int, longest: int, sequences: int, **options: bool
) -> MemoryEstimate:
    """Return the memory and the communication of rank 0 of a model that is trained.

    Args:
        size: size of the model.
        config: configuration of the engine.
        ranks: number of ranks.
        longest: maximum number of tokens of a sequence.
        sequences: number of sequences of an optimizer step.
        options: as in `training`.

    Raises:
        ValueError: the ranks, or the heads or experts of the model, are not divisible as the configuration says.
    """
    if size is not None:
        check_axes(size, config)
    each = -(-sequences // config.data_ranks(ranks))
    tokens = micro_batch_tokens(config, longest, each)
    several = steps_in_parts(config, longest, each)
    estimate = training(size, config, ranks, tokens=-(-tokens // config.context), several=several, **options)
    if size is not None and not options.get("has_head", True):
        size = size.without_head
    trained = None if size is None else _trained(size, config)
    if size is None or trained is None or not size.layers:
        return estimate
    computed = -(-each * longest // config.context)
    passes = -(-each * longest // tokens)
    return replace(estimate, sends=sent_bytes(size, config, ranks, trained=trained, tokens=computed, passes=passes))


def training(
    size: ModelSize | None,
    config: TrainConfig,
    ranks: int,
    *,
    tokens: int,
    several: bool = False,
    gpu: bool = False,
    publishes: bool = False,
    has_head: bool = True,
    sleeps: bool = False,
) -> MemoryEstimate:
    """Return the memory of rank 0 of a model that is trained.

    Args:
        size: size of the model.
        config: configuration of the engine.
        ranks: number of ranks that share the model.
        tokens: number of tokens of the largest possible micro-batch.
        several: True if an optimizer step may have several micro-batches.
        gpu: True if it is trained on a GPU.
        publishes: True if rank 0 publishes the weights to engines that sample. It keeps two versions of them.
        has_head: True if the model has an output layer over the vocabulary. Critics and reward models have none.
        sleeps: True if it is moved to host memory while others work.
    """
    base = PROCESS_BYTES["process"]
    if gpu:
        base = CONTEXT_BYTES + (NCCL_BYTES if ranks > 1 else 0)
    if size is not None and not has_head:
        size = size.without_head
    trained = None if size is None else _trained(size, config)
    if size is None or trained is None:
        return MemoryEstimate(weights=None, gradients=None, optimizer=None, passes=None, base=base, sleeps=sleeps)
    engine_type = _FSDPMemory if config.engine == "fsdp" else _DeepSpeedMemory
    if config.tensor > 1:
        # A rank holds a smaller model of its own, which fewer ranks share.
        cut = size.cut(config.tensor)
        engine = engine_type(cut, config, ranks // config.tensor, cut.parameters, several, gpu)
    else:
        engine = engine_type(size, config, ranks, trained, several, gpu)
    resident = engine.resident()
    if config.adam_offload and gpu:
        resident = engine.offloaded(resident)
    # DeepSpeed keeps a buffer for the gradients of ZeRO 3.
    freed_gradients = 0 if config.engine == "deepspeed" and config.stage == 3 else resident.gradients
    host = resident.host
    if sleeps:
        host += resident.weights + resident.gradients - freed_gradients + resident.optimizer
    return MemoryEstimate(
        weights=resident.weights,
        gradients=resident.gradients,
        optimizer=resident.optimizer,
        passes=_pass_bytes(engine, tokens, has_head),
        base=base,
        freed_gradients=freed_gradients,
        host=host,
        loading=min(2 * BUCKET_BYTES["cuda"], 4 * size.parameters) if gpu else 0,
        first=0 if config.ema_beta is None else 4 * trained,
        published=2 * engine.width * size.parameters if publishes else 0,
        sleeps=sleeps,
    )


def _pass_bytes(engine: _TrainingMemory, tokens: int, has_head: bool) -> int | None:
    """Maximum memory of a forward and backward pass, or of the optimizer step after it; None if it is not known."""
    size, config = engine.size, engine.config
    activations = _activations(size, tokens, config)
    if activations is None:
        return None
    head_bytes = _head_bytes(size, tokens, config, engine.gpu) if has_head else 0
    head_numbers = size.vocabulary * size.hidden if has_head else 0
    # The backward pass of the output layer comes before that of the layers.
    backward = max(head_bytes + engine.gathered_rest(), engine.backward(head_numbers))
    return max(activations + backward, engine.step())


@dataclass(frozen=True)
class _Resident:
    """Memory of a trained model between two optimizer steps, or at the end of one."""

    weights: int
    gradients: int
    optimizer: int
    host: int = 0
    """Part that is offloaded to host memory."""


@dataclass(frozen=True)
class _TrainingMemory(ABC):
    """Memory of the parameters of a model under a training engine."""

    size: ModelSize
    config: TrainConfig
    ranks: int
    trained: int
    """Number of trained parameters, of the model or of its adapters."""
    several: bool
    gpu: bool

    @property
    def width(self) -> int:
        """Bytes of a number of the weights in passes."""
        return 2 if self.config.precision == "bf16" else 4

    @property
    def whole(self) -> int:
        """Number of parameters that a pass needs on this rank. Experts that ranks share are counted for this rank."""
        experts = self.size.expert_parameters
        return self.size.parameters - (experts - experts // self.config.expert)

    @property
    def layer(self) -> int:
        """Number of parameters of a layer that a pass needs on this rank."""
        return (self.whole - self.size.rest) // max(1, self.size.layers)

    @property
    def stored(self) -> int:
        """Number of parameters with those of adapters."""
        return self.size.parameters + (self.trained if self.config.lora_rank else 0)

    @abstractmethod
    def resident(self) -> _Resident:
        """Return the memory between two optimizer steps, without offloading."""

    @abstractmethod
    def offloaded(self, resident: _Resident) -> _Resident:
        """Return the memory between two optimizer steps with the optimizer offloaded to host memory."""

    @abstractmethod
    def gathered_rest(self) -> int:
        """Bytes of the parameters outside of layers that are gathered during a whole pass."""

    @abstractmethod
    def backward(self, head: int) -> int:
        """Return the bytes of gathered parameters and of gradients in buffers while activations exist.

        Args:
            head: number of weights of the output layer, whose gradient is computed first and kept until the end of the
                pass; 0 without an output layer.
        """

    @abstractmethod
    def step(self) -> int:
        """Return the bytes of the optimizer step, after the activations are freed."""


class _FSDPMemory(_TrainingMemory):
    """Memory under fsdp, which keeps weights in float32, shards all of them, and gathers layers for passes."""

    def resident(self) -> _Resident:
        return _Resident(4 * self.stored // self.ranks, 4 * self.trained // self.ranks, 8 * self.trained // self.ranks)

    def offloaded(self, resident: _Resident) -> _Resident:
        host = resident.optimizer + 4 * self.trained // self.ranks + resident.weights
        return _Resident(0, resident.gradients if self.config.stage < 2 else 0, 0, host)

    def gathered_rest(self) -> int:
        return self.width * self.size.rest

    def backward(self, head: int) -> int:
        gradients = self._layer_gradients(head)
        if self.config.stage == 3:
            # One layer is computed while the next one is gathered.
            return self.gathered_rest() + 2 * self.width * self.layer + gradients
        accumulated = 0
        if self.several:
            # Gradients of all micro-batches but the last are added up in float32, unsharded.
            unsharded = self.trained if self.config.lora_rank else self.whole
            accumulated = 4 * (unsharded - self.trained // self.ranks)
        return self.width * self.whole + accumulated + gradients

    def _layer_gradients(self, head: int) -> int:
        """Bytes of the gradient of a layer with its float32 copy, which is reduced, and of the output layer."""
        if self.config.lora_rank:
            return (self.width + 4) * (self.trained // max(1, self.size.layers))
        return (self.width + 4) * self.layer + self.width * head

    def step(self) -> int:
        # Gradients of the parameters outside of layers are reduced last.
        return 0 if self.config.lora_rank else (2 * self.width + 4) * self.size.rest


class _DeepSpeedMemory(_TrainingMemory):
    """Memory under DeepSpeed, where the stage of ZeRO determines which parts are sharded."""

    @property
    def bucket(self) -> int:
        """Maximum number of gradients in a buffer."""
        return ZERO_NUMBERS["cuda" if self.gpu else "cpu"]

    @property
    def buffer(self) -> int:
        """Bytes of the buffer in which gradients wait. A GPU allocates it as a whole."""
        return self.width * (self.bucket if self.gpu else min(self.trained, self.bucket))

    def resident(self) -> _Resident:
        stage, trained, ranks = self.config.stage, self.trained, self.ranks
        weights = self.width * self.stored // (ranks if stage == 3 else 1)
        gradients = 4 * trained // (ranks if stage >= 2 else 1)
        # Without sharding the weights are the master weights.
        optimizer = 8 * trained if stage == 0 else 12 * trained // ranks
        return _Resident(weights, gradients, optimizer)

    def offloaded(self, resident: _Resident) -> _Resident:
        host = resident.optimizer + 4 * self.trained // self.ranks
        # Gradients that are not sharded stay on the GPU until the end of the step.
        return _Resident(resident.weights, resident.gradients if self.config.stage < 2 else 0, 0, host)

    def gathered_rest(self) -> int:
        return 0

    def backward(self, head: int) -> int:
        stage = self.config.stage
        if stage == 0:
            return 0
        if stage == 1:
            # ZeRO 1 fills the buffer at the end of the step; see `step`. A GPU has it from the start.
            return self.buffer if self.gpu else 0
        # A gradient that is larger than the buffer is reduced alone.
        reduced = self.width * min(self.trained, max(self.bucket, head))
        gathered = 0
        if stage == 3 and self.ranks > 1:
            at_once = max(self.bucket, 2 * self.layer) + self.size.rest
            gathered = self.width * min(self.size.parameters, at_once)
        return reduced + self.buffer + gathered

    def step(self) -> int:
        # Gradients of the step in float32, for the optimizer.
        shard = self.trained // self.ranks
        match self.config.stage:
            case 0:
                return 4 * min(self.trained, _REDUCED)
            case 1:
                return 4 * shard + self.buffer
            case 2:
                return 4 * shard
            case _:
                return 4 * min(shard, self.bucket)


def frozen(
    size: ModelSize | None,
    precision: str,
    *,
    tokens: int,
    gpu: bool = False,
    has_head: bool = True,
    layout: str = "whole",
    ranks: int = 1,
) -> MemoryEstimate:
    """Bytes of a model that is only evaluated.

    Args:
        size: of the model.
        precision: as in `FrozenConfig`.
        tokens: of the largest micro-batch that there can be.
        gpu: it computes there.
        has_head: it has an output layer over the vocabulary.
        layout: "whole" in each process; "sharded" over the ranks, which gather a layer for the pass over it, and the
            next one; or "offloaded": sharded, and what a rank keeps is on the machine.
        ranks: processes of its role.
    """
    is_whole = layout == "whole"
    base = (CONTEXT_BYTES + NCCL_BYTES * (ranks > 1 and not is_whole)) if gpu else PROCESS_BYTES["process"]
    if size is None:
        return MemoryEstimate(weights=None, passes=None, base=base)
    size = size if has_head else size.without_head
    width, embedding = _WIDTH[weight_type(precision)], size.vocabulary * size.hidden
    # What is multiplied is kept in the type of products; embeddings are not.
    narrow = _WIDTH[product_type(precision)]
    weights = narrow * (size.parameters - embedding) + width * embedding
    weights //= 1 if is_whole else ranks
    passes = None
    if size.layers:
        # Of one layer at a time, nothing kept.
        numbers = 4 * size.hidden + 3 * size.intermediate + size.experts_per_token * size.hidden
        passes = tokens * numbers * width + (_logits(size, tokens, width, gpu) if has_head else 0)
        if not is_whole:
            passes += width * embedding + narrow * size.head + 2 * narrow * (size.parameters - size.rest) // size.layers
    waits = gpu and layout == "offloaded"
    return MemoryEstimate(
        weights=0 if waits else weights,
        passes=passes,
        base=base,
        host=weights * waits,
        loading=min(2 * BUCKET_BYTES["cuda"], weights) * gpu,
    )


def sampling(
    size: ModelSize | None, config: RolloutConfig, rows: int, tokens: int, device_bytes: int | None, *, gpu: bool
) -> MemoryEstimate:
    """Bytes of one engine that samples, on each of its devices; on a CPU of all its processes.

    Args:
        size: of the model.
        config: of the engine.
        rows: sequences that it is given at a time.
        tokens: of the longest sequence that there may be.
        device_bytes: of its GPU, where known.
        gpu: it samples there.
    """
    if isinstance(config, PagedRolloutConfig):
        return _vllm(size, config, rows, tokens, device_bytes, gpu)
    width = _WIDTH[config.weights_dtype]
    base = CONTEXT_BYTES if gpu else PROCESS_BYTES["process"]
    weights = None if size is None else width * size.parameters
    loading = (weights or 0) * gpu
    if size is None or not size.layers:
        return MemoryEstimate(weights=weights, cache=None, passes=None, base=base, loading=loading, generates=True)
    rows = min(rows, config.max_num_seqs)
    return MemoryEstimate(
        weights=weights,
        cache=rows * tokens * 2 * size.layers * size.keys * width,
        passes=2 * rows * size.vocabulary * 4,
        base=base,
        loading=loading,
        grows=True,
        generates=True,
    )


def _vllm(
    size: ModelSize | None, config: PagedRolloutConfig, rows: int, tokens: int, device_bytes: int | None, gpu: bool
) -> MemoryEstimate:
    """Of an engine of vLLM, whose cache has what is left of its share."""
    width, parts = _WIDTH[config.dtype], config.tensor_parallel_size
    weights = None if size is None else width * size.parameters
    if not gpu:
        cache, base = int(config.cpu_cache_gb * 2**30), PROCESS_BYTES["vllm"] * parts
        return MemoryEstimate(weights=weights, cache=cache, base=base, generates=True)
    base = CONTEXT_BYTES + GRAPH_BYTES * (not config.enforce_eager) + NCCL_BYTES * (parts > 1)
    # While it sleeps its weights are on the machine.
    host = (weights or 0) * config.enable_sleep
    known = {"base": base, "sleeps": config.enable_sleep, "host": host, "generates": True}
    weights = None if weights is None else weights // parts
    if device_bytes is None or weights is None or size is None:
        return MemoryEstimate(weights=weights, cache=None, passes=None, **known)
    passes = _vllm_pass(size, min(rows, config.max_num_seqs), width, parts)
    longest = 2 * size.layers * size.keys * width * tokens // parts
    share = int(config.gpu_memory_utilization * device_bytes)
    left = share - base - weights - passes
    short = max(longest - left, 0)
    return MemoryEstimate(weights=weights, cache=max(left, 0), passes=passes, share=share, short=short, **known)


def _vllm_pass(size: ModelSize, rows: int, width: int, parts: int) -> int:
    """What vLLM measures before it makes its cache: a pass over as many tokens as it reads at a time, or the logits of
    all rows in float32, as they are and as log-probabilities.
    """
    split = size.queries + 2 * size.keys + 3 * size.intermediate
    numbers = 4 * size.hidden + 2 * size.experts_per_token * size.hidden + split // parts
    return max(VLLM_TOKENS * numbers * width, 3 * 4 * rows * size.vocabulary)


def micro_batch_tokens(config: TrainConfig, longest: int, sequences: int) -> int:
    """Tokens of the largest micro-batch there can be.

    Args:
        config: of the engine, which cuts by tokens, by sequences, or both.
        longest: tokens of a sequence, at most.
        sequences: of an optimizer step on one rank.
    """
    return max(longest, min(config.max_tokens, min(config.max_sequences or sequences, sequences) * longest))


def steps_in_parts(config: TrainConfig, longest: int, sequences: int) -> bool:
    """Whether an optimizer step may have several micro-batches; arguments as in `micro_batch_tokens`."""
    return sequences * longest > micro_batch_tokens(config, longest, sequences)


def _trained(size: ModelSize, config: TrainConfig) -> int | None:
    """Parameters that are trained; None where adapters go to layers that are not known."""
    if not config.lora_rank:
        return size.parameters
    if not size.layers:
        return None
    wanted: Collection[str] = [name.strip() for name in config.lora_target_modules.split(",")]
    chosen = [name for name in size.linears if "all-linear" in wanted or any(w.endswith(name) for w in wanted)]
    return config.lora_rank * size.layers * sum(sum(size.linears[name]) for name in chosen) if chosen else None


def _activations(size: ModelSize, tokens: int, config: TrainConfig) -> int | None:
    """Activations that are kept for the backward pass.

    Per token and layer as counted in transformers' Llama-like layers: norms compute in float32 whatever the weights
    are, the attention keeps queries, keys, values and its output, and the MLP four of its width. Experts keep what goes
    in, what comes out, and that weighted, of each expert of a token.
    """
    if not size.layers:
        return None
    width = 4 if config.precision == "fp32" else 2
    numbers = _STATES[config.precision] * size.hidden + 2 * size.queries + 2 * size.keys + 4 * size.intermediate
    layer = tokens * (numbers + 3 * size.experts_per_token * size.hidden) * width
    if config.precision == "bf16_autocast":
        # Matrix products keep the weights that they were given, rounded.
        layer += 2 * (size.parameters - size.rest) // size.layers
    kept = layer + size.layers * tokens * size.hidden * width if config.gradient_checkpointing else layer * size.layers
    # A quarter more for the gradients of activations.
    return kept * 5 // 4


def _head_bytes(size: ModelSize, tokens: int, config: TrainConfig, gpu: bool) -> int:
    """Of the output layer in the backward pass: the logits of a chunk, and the gradient of the weights in float32."""
    logits = _logits(size, tokens, 4 if config.precision == "fp32" else 2, gpu)
    return logits + 4 * size.vocabulary * size.hidden


def _logits(size: ModelSize, tokens: int, width: int, gpu: bool) -> int:
    """Of a chunk, as components/models/head.py cuts them, and of their gradient."""
    most, rows = (2**27, 512) if gpu else (2**24, 256)
    return 2 * width * size.vocabulary * min(tokens, max(rows, most // max(1, size.vocabulary)))

"""Memory of a model that is trained, evaluated or sampled from, computed before anything is loaded.

This module imports without torch. A number that follows neither from the weight files nor from a known architecture is
None. scripts/bench_plan.py compares the numbers with processes on a CPU. Those of GPUs are computed, not measured.

Roles share a device in phases, and its peak is that of the largest phase: responses are generated, then models are
trained and evaluated, then weights are sent to the engines. A model that sleeps takes no memory in the phases of other
roles (`phases`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from components.generate.config import RolloutConfig
from components.generate.paged_config import PagedRolloutConfig
from components.models.part_size import linear_sizes, part_of_rank
from components.models.size import ModelSize
from components.train.config import TrainConfig
from components.train.memory_sizes import CONTEXT_BYTES, ZERO_NUMBERS
from components.weights.bucket_sizes import BUCKET_BYTES
from plugins.plan.arithmetic import WIDTH, amount_if, product_width, weight_width
from plugins.plan.communication import sent_bytes
from training.launch.model_use import check_axes

PROCESS_BYTES = {"driver": 250_000_000, "process": 400_000_000, "vllm": 1_100_000_000}
"""Proportional set size of an interpreter with its libraries: of the driver, of a process with torch, with vLLM."""
NCCL_BYTES = 1_000_000_000
"""GPU memory for the communication buffers of a process group. Issues 864 and 964 of NVIDIA/nccl report between 0.5 GB
(2 GPUs) and 1.6 GB (8 GPUs)."""
GRAPH_BYTES = 1_000_000_000
"""GPU memory for vLLM's CUDA graphs. A round number: users report 0.2 to 1 GB. The graphs stay while an engine
sleeps."""
VLLM_TOKENS = 16384
"""Maximum number of tokens that vLLM processes in one forward pass."""
_REDUCED = 500_000_000
"""Number of gradients that DeepSpeed reduces at a time with `zero_stage` 0."""
_STATES = {"fp32": 7, "bf16": 9, "bf16_autocast": 14}
"""Number of hidden states per token that a layer keeps for the backward pass, in values of the matrix products'
dtype."""
_ADDED = ("weights", "gradients", "optimizer", "cache", "freed_gradients", "host", "first", "published")
"""Parts of an estimate that are added if one process has several uses."""
_LARGEST = ("passes", "base", "loading", "share", "short")
"""Alternatives of which the largest counts, because the uses run one after the other."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one process of a role in bytes, on the device where it computes: a GPU, or the machine without one.

    None stands for a number that is not known.
    """

    weights: int | None = 0
    gradients: int | None = 0
    optimizer: int | None = 0
    """Optimizer states, with the float32 master weights."""
    cache: int | None = 0
    """Cache of keys and values."""
    passes: int | None = 0
    """Maximum memory during a pass besides the above: activations, logits, gathered parameters, gradient buffers."""
    base: int = PROCESS_BYTES["process"]
    """Interpreter and libraries. On a GPU: the CUDA context, the buffers of NCCL, and CUDA graphs."""
    freed_gradients: int = 0
    """Part of the gradients that exists only during training."""
    host: int = 0
    """Host memory if the process computes on a GPU: offloaded states, and weights of a sleeping model."""
    loading: int = 0
    """Additional host memory while the model is created."""
    first: int = 0
    """Additional host memory of rank 0: the moving average of the weights."""
    published: int = 0
    """Weights for the rollout engines, in shared memory of the machine, or on disk if that is full."""
    grows: bool = False
    """True if the cache is not allocated at the start and grows up to the longest possible sequences."""
    sleeps: bool = False
    """True if all memory but the base is freed while other roles on the same device work."""
    generates: bool = False
    """True if the process works while responses are generated. Other roles work after that."""
    share: int = 0
    """Memory of a GPU that vLLM may take; 0 without vLLM, or if it is not known."""
    short: int = 0
    """Number of bytes by which the share is too small for the weights, one sequence and the buffers of vLLM."""
    sends: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of bytes sent to other ranks in an optimizer step, by the axis of the ranks."""
    parts: tuple[MemoryEstimate, ...] = ()
    """Estimates of the single uses, if one process has several."""

    @property
    def fixed_bytes(self) -> int:
        """Number of bytes that are always used, as far as known."""
        parts = [self.weights, self.gradients, self.optimizer, amount_if(not self.grows, self.cache)]
        return sum(part or 0 for part in parts)

    @property
    def transient_bytes(self) -> int:
        """Maximum number of additional bytes while the process works, as far as known."""
        return (self.passes or 0) + amount_if(self.grows, self.cache)

    @property
    def total(self) -> int:
        """Maximum number of bytes, as far as known."""
        return self.base + self.fixed_bytes + self.transient_bytes

    @property
    def is_known(self) -> bool:
        """True if no part is unknown."""
        return None not in (self.weights, self.gradients, self.optimizer, self.cache, self.passes)


def _combined(combine: Callable[[list[Any]], int], estimates: Sequence[MemoryEstimate], name: str) -> int | None:
    """Return the sum or maximum of a part of several estimates, or None if it is unknown in one of them."""
    amounts = [getattr(estimate, name) for estimate in estimates]
    return None if None in amounts else combine(amounts)


def together(*estimates: MemoryEstimate) -> MemoryEstimate:
    """Return the memory of one process with several uses, which work one after the other and keep what they hold."""
    sums: dict[str, Any] = {name: _combined(sum, estimates, name) for name in _ADDED}
    maxima: dict[str, Any] = {name: _combined(max, estimates, name) for name in _LARGEST}
    return MemoryEstimate(
        **sums,
        **maxima,
        grows=any(estimate.grows for estimate in estimates),
        sleeps=all(estimate.sleeps for estimate in estimates),
        generates=all(estimate.generates for estimate in estimates),
        sends=sum((Counter(estimate.sends) for estimate in estimates), Counter[str]()),
        parts=tuple(part for estimate in estimates for part in estimate.parts or (estimate,)),
    )


@dataclass(frozen=True)
class Phase:
    """Memory of one device in a phase of a step, without the base of its processes."""

    name: str
    fixed_bytes: int
    """Number of bytes that are always used."""
    transient_bytes: int
    """Maximum number of additional bytes. Roles work one after the other, so the largest one decides."""

    @property
    def most(self) -> int:
        """Maximum number of bytes."""
        return self.fixed_bytes + self.transient_bytes


def phases(estimates: Iterable[MemoryEstimate]) -> list[Phase]:
    """Return the phases of a step in order, on a device that is shared by processes with these estimates."""
    parts = [part for estimate in estimates for part in estimate.parts or (estimate,)]
    engines = [part for part in parts if part.generates]
    others = [part for part in parts if not part.generates]
    timeline: list[Phase] = []
    if engines:
        idle = sum(part.fixed_bytes - part.freed_gradients for part in others if not part.sleeps)
        generating = idle + sum(part.fixed_bytes for part in engines)
        timeline.append(Phase("generation", generating, max(part.transient_bytes for part in engines)))
    if others:
        awake = sum(part.fixed_bytes for part in parts if not (part.sleeps and part.generates))
        name = "training" if engines else "work"
        timeline.append(Phase(name, awake, max(part.transient_bytes for part in others)))
    if engines and any(part.published for part in others):
        # A sleeping engine receives its weights before it allocates a cache, so only its weights count.
        woken = sum(part.weights or 0 for part in engines if part.sleeps)
        awake = sum(part.fixed_bytes for part in engines if not part.sleeps)
        trained = sum(part.fixed_bytes - part.freed_gradients for part in others)
        timeline.append(Phase("weight sync", trained + woken + awake, 2 * BUCKET_BYTES["cuda"]))
    return timeline


def learning(
    size: ModelSize | None, config: TrainConfig, ranks: int, longest: int, sequences: int, **options: bool
) -> MemoryEstimate:
    """Return the memory and the communication of rank 0 of a model that is trained.

    Args:
        size: size of the model.
        config: configuration of the engine.
        ranks: number of ranks.
        longest: maximum number of tokens of a sequence.
        sequences: number of sequences of an optimizer step, on all ranks.
        options: keyword arguments of `training`.

    Raises:
        ValueError: the ranks, or the heads or experts of the model, are not divisible as the configuration says.
    """
    check_axes(size, config)
    each = -(-sequences // config.data_ranks(ranks))
    tokens = micro_batch_tokens(config, longest, each)
    several = steps_in_parts(config, longest, each)
    estimate = training(size, config, ranks, tokens=-(-tokens // config.context), several=several, **options)
    if size is not None and not options.get("has_head", True):
        size = size.without_head
    trained = _trained(size, config)
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
    base = _base_bytes(gpu, _groups(config, ranks))
    if size is not None and not has_head:
        size = size.without_head
    trained = _trained(size, config)
    if size is None or trained is None:
        return MemoryEstimate(weights=None, gradients=None, optimizer=None, passes=None, base=base, sleeps=sleeps)
    engine_type = {"fsdp": _FSDPMemory}.get(config.engine, _DeepSpeedMemory)
    engine = engine_type(size, config, ranks, trained, several, gpu)
    if config.tensor > 1:
        # Each rank holds a smaller model, and fewer ranks shard it.
        cut = part_of_rank(size, config.tensor)
        engine = engine_type(cut, config, ranks // config.tensor, cut.parameters, several, gpu)
    resident = engine.resident()
    if config.adam_offload and gpu:
        resident = engine.offloaded(resident)
    # DeepSpeed keeps the gradient buffer of ZeRO 3 between steps; all other gradients are freed after the step.
    keeps_gradients = config.engine == "deepspeed" and config.stage == 3
    freed_gradients = amount_if(not keeps_gradients, resident.gradients)
    moved = resident.weights + resident.gradients - freed_gradients + resident.optimizer
    host = resident.host + amount_if(sleeps, moved)
    return MemoryEstimate(
        weights=resident.weights,
        gradients=resident.gradients,
        optimizer=resident.optimizer,
        passes=_pass_bytes(engine, tokens, has_head),
        base=base,
        freed_gradients=freed_gradients,
        host=host,
        loading=amount_if(gpu, min(2 * BUCKET_BYTES["cuda"], 4 * size.parameters)),
        first=amount_if(config.ema_beta is not None, 4 * trained),
        published=amount_if(publishes, 2 * engine.width * size.parameters),
        sleeps=sleeps,
    )


def _base_bytes(gpu: bool, groups: int) -> int:
    """Return the bytes of a process with torch where it computes: on the host, or on a GPU with its communication.

    Args:
        gpu: True if it computes on a GPU.
        groups: number of process groups over which it sends tensors. Each has buffers of its own, also while the model
            sleeps.
    """
    return CONTEXT_BYTES + groups * NCCL_BYTES if gpu else PROCESS_BYTES["process"]


def _groups(config: TrainConfig, ranks: int) -> int:
    """Return the number of process groups over which a rank sends parameters, gradients or activations."""
    # An axis of ranks that share sequences or layers comes with the group over which its parts are sharded; that of
    # experts with the group of the ranks that have the same ones.
    shared = (config.context > 1) + (config.tensor > 1)
    return amount_if(ranks > 1, 1 + shared + min(shared, 1) + 2 * min(config.expert - 1, 1))


def _pass_bytes(engine: _TrainingMemory, tokens: int, has_head: bool) -> int | None:
    """Return the maximum memory of a forward and backward pass or of the optimizer step after it, or None if
    unknown.
    """
    size, config = engine.size, engine.config
    activations = _activations(size, tokens, config)
    if activations is None:
        return None
    head_bytes = amount_if(has_head, _head_bytes(size, tokens, config, engine.gpu))
    head_numbers = amount_if(has_head, size.vocabulary * size.hidden)
    # The backward pass of the output layer runs before that of the layers, so the larger of the two decides.
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
        """Number of bytes of a weight in passes."""
        return weight_width(self.config.precision)

    @property
    def unsharded(self) -> int:
        """Number of parameters that a pass needs on this rank. Of experts that ranks share, only this rank's count."""
        experts = self.size.expert_parameters
        return self.size.parameters - (experts - experts // self.config.expert)

    @property
    def layer(self) -> int:
        """Number of parameters of a layer that a pass needs on this rank."""
        return (self.unsharded - self.size.rest) // max(1, self.size.layers)

    @property
    def stored(self) -> int:
        """Number of parameters, including those of adapters."""
        return self.size.parameters + amount_if(self.config.lora_rank, self.trained)

    @abstractmethod
    def resident(self) -> _Resident:
        """Return the memory between two optimizer steps, without offloading."""

    @abstractmethod
    def offloaded(self, resident: _Resident) -> _Resident:
        """Return the memory between two optimizer steps with the optimizer offloaded to host memory."""

    @abstractmethod
    def gathered_rest(self) -> int:
        """Return the bytes of parameters outside of layers that are gathered during a whole pass."""

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
    """Memory under fsdp, which stores sharded float32 weights and gathers them layer by layer for passes."""

    def resident(self) -> _Resident:
        return _Resident(4 * self.stored // self.ranks, 4 * self.trained // self.ranks, 8 * self.trained // self.ranks)

    def offloaded(self, resident: _Resident) -> _Resident:
        host = resident.optimizer + 4 * self.trained // self.ranks + resident.weights
        return _Resident(0, amount_if(self.config.stage < 2, resident.gradients), 0, host)

    def gathered_rest(self) -> int:
        return self.width * self.size.rest

    def backward(self, head: int) -> int:
        gradients = self._layer_gradients(head)
        if self.config.stage == 3:
            # One layer computes while the next one is gathered.
            return self.gathered_rest() + 2 * self.width * self.layer + gradients
        accumulated = 0
        if self.several:
            # Until the last micro-batch, gradients are added up in float32 without sharding.
            unsharded = self.trained if self.config.lora_rank else self.unsharded
            accumulated = 4 * (unsharded - self.trained // self.ranks)
        return self.width * self.unsharded + accumulated + gradients

    def _layer_gradients(self, head: int) -> int:
        """Return the bytes of a layer's gradient, its float32 copy for the reduction, and the output layer's
        gradient.
        """
        if self.config.lora_rank:
            return (self.width + 4) * (self.trained // max(1, self.size.layers))
        return (self.width + 4) * self.layer + self.width * head

    def step(self) -> int:
        # Gradients of the parameters outside of layers are reduced last, after the activations are freed.
        return amount_if(not self.config.lora_rank, (2 * self.width + 4) * self.size.rest)


class _DeepSpeedMemory(_TrainingMemory):
    """Memory under DeepSpeed, where the stage of ZeRO determines which parts are sharded."""

    @property
    def bucket(self) -> int:
        """Maximum number of gradients in a buffer."""
        return ZERO_NUMBERS["cuda" if self.gpu else "cpu"]

    @property
    def buffer(self) -> int:
        """Number of bytes of the buffer that collects gradients. A GPU allocates it in full."""
        return self.width * (self.bucket if self.gpu else min(self.trained, self.bucket))

    def resident(self) -> _Resident:
        weights = self.width * self.stored
        gradients = 4 * self.trained
        optimizer = 12 * self.trained // self.ranks
        if self.config.stage == 0:
            # Without sharding the weights are the master weights, so the optimizer has two states per parameter.
            optimizer = 8 * self.trained
        if self.config.stage >= 2:
            gradients //= self.ranks
        if self.config.stage == 3:
            weights //= self.ranks
        return _Resident(weights, gradients, optimizer)

    def offloaded(self, resident: _Resident) -> _Resident:
        host = resident.optimizer + 4 * self.trained // self.ranks
        # Gradients that are not sharded stay on the GPU until the end of the step.
        return _Resident(resident.weights, amount_if(self.config.stage < 2, resident.gradients), 0, host)

    def gathered_rest(self) -> int:
        return 0

    def backward(self, head: int) -> int:
        stage = self.config.stage
        if stage == 0:
            return 0
        if stage == 1:
            # ZeRO 1 fills the buffer at the end of the step (see `step`), but a GPU allocates it at the start.
            return amount_if(self.gpu, self.buffer)
        # A gradient that is larger than the buffer is reduced on its own.
        reduced = self.width * min(self.trained, max(self.bucket, head))
        gathered = 0
        if stage == 3 and self.ranks > 1:
            at_once = max(self.bucket, 2 * self.layer) + self.size.rest
            gathered = self.width * min(self.size.parameters, at_once)
        return reduced + self.buffer + gathered

    def step(self) -> int:
        # The optimizer needs the gradients of the step in float32.
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
    """Return the memory of one process with a model that is only evaluated.

    Args:
        size: size of the model.
        precision: see `FrozenConfig`.
        tokens: number of tokens of the largest possible micro-batch.
        gpu: True if it is evaluated on a GPU.
        has_head: True if the model has an output layer over the vocabulary.
        layout: "whole": every process holds all weights. "sharded": the ranks share them, and gather the layer of the
            current pass and the next one. "offloaded": sharded, with this rank's shard in host memory.
        ranks: number of processes of the role.
    """
    is_whole = layout == "whole"
    base = _base_bytes(gpu, groups=amount_if(ranks > 1 and not is_whole, 1))
    if size is None:
        return MemoryEstimate(weights=None, passes=None, base=base)
    size = size if has_head else size.without_head
    width = weight_width(precision)
    embedding = size.vocabulary * size.hidden
    # Weights of matrix products are stored in the dtype of the products. Embeddings are not.
    narrow = product_width(precision)
    weights = narrow * (size.parameters - embedding) + width * embedding
    weights //= 1 if is_whole else ranks
    passes = None
    if size.layers:
        # Without a backward pass only one layer's activations exist at a time.
        numbers = 4 * size.hidden + 3 * size.intermediate + size.experts_per_token * size.hidden
        passes = tokens * numbers * width + amount_if(has_head, _logits(size, tokens, width, gpu))
        if not is_whole:
            passes += width * embedding + narrow * size.head + 2 * narrow * (size.parameters - size.rest) // size.layers
    is_offloaded = gpu and layout == "offloaded"
    return MemoryEstimate(
        weights=amount_if(not is_offloaded, weights),
        passes=passes,
        base=base,
        host=amount_if(is_offloaded, weights),
        loading=amount_if(gpu, min(2 * BUCKET_BYTES["cuda"], weights)),
    )


def sampling(
    size: ModelSize | None, config: RolloutConfig, rows: int, tokens: int, device_bytes: int | None, *, gpu: bool
) -> MemoryEstimate:
    """Return the memory of one rollout engine, on each of its devices. On a CPU it covers all processes of the engine.

    Args:
        size: size of the model.
        config: configuration of the engine.
        rows: number of sequences that the engine gets at a time.
        tokens: maximum number of tokens of a sequence.
        device_bytes: memory of its GPU, or None if it is not known.
        gpu: True if it runs on a GPU.
    """
    if isinstance(config, PagedRolloutConfig):
        return _vllm(size, config, rows, tokens, device_bytes, gpu)
    width = WIDTH[config.weights_dtype]
    base = _base_bytes(gpu, groups=0)
    weights = _weight_bytes(size, width)
    loading = amount_if(gpu, weights)
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
    """Return the memory of a vLLM engine, whose cache gets the rest of the engine's share of a GPU."""
    width = WIDTH[config.dtype]
    parts = config.tensor_parallel_size
    weights = _weight_bytes(size, width)
    if not gpu:
        cache = int(config.cpu_cache_gb * 2**30)
        return MemoryEstimate(weights=weights, cache=cache, base=PROCESS_BYTES["vllm"] * parts, generates=True)
    base = CONTEXT_BYTES + amount_if(not config.enforce_eager, GRAPH_BYTES) + amount_if(parts > 1, NCCL_BYTES)
    # A sleeping engine keeps its weights in host memory.
    host = amount_if(config.enable_sleep, weights)
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


def _weight_bytes(size: ModelSize | None, width: int) -> int | None:
    """Return the bytes of all weights, or None if the size of the model is unknown."""
    if size is None:
        return None
    return width * size.parameters


def _vllm_pass(size: ModelSize, rows: int, width: int, parts: int) -> int:
    """Return the memory that vLLM measures before it allocates its cache.

    It is the larger of a pass over `VLLM_TOKENS` tokens, and of the logits of all rows in float32, as logits and as
    log-probabilities.
    """
    split = size.queries + 2 * size.keys + 3 * size.intermediate
    numbers = 4 * size.hidden + 2 * size.experts_per_token * size.hidden + split // parts
    return max(VLLM_TOKENS * numbers * width, 3 * 4 * rows * size.vocabulary)


def micro_batch_tokens(config: TrainConfig, longest: int, sequences: int) -> int:
    """Return the number of tokens of the largest possible micro-batch.

    Args:
        config: configuration of the engine, which limits micro-batches by tokens, by sequences, or by both.
        longest: maximum number of tokens of a sequence.
        sequences: number of sequences of an optimizer step on one rank.
    """
    return max(longest, min(config.max_tokens, min(config.max_sequences or sequences, sequences) * longest))


def steps_in_parts(config: TrainConfig, longest: int, sequences: int) -> bool:
    """Return True if an optimizer step may have several micro-batches. See `micro_batch_tokens` for the arguments."""
    return sequences * longest > micro_batch_tokens(config, longest, sequences)


def _trained(size: ModelSize | None, config: TrainConfig) -> int | None:
    """Return the number of trained parameters, or None if the size or the layers with adapters are unknown."""
    if size is None or (config.lora_rank and not size.layers):
        return None
    if not config.lora_rank:
        return size.parameters
    targets: Collection[str] = [name.strip() for name in config.lora_target_modules.split(",")]
    sizes = linear_sizes(size)
    chosen = [name for name in sizes if "all-linear" in targets or any(t.endswith(name) for t in targets)]
    return config.lora_rank * size.layers * sum(sum(sizes[name]) for name in chosen) if chosen else None


def _activations(size: ModelSize, tokens: int, config: TrainConfig) -> int | None:
    """Return the bytes of activations kept for the backward pass, or None if the layers are unknown.

    Per token and layer they are counted in transformers' Llama-like layers: norms compute in float32 with weights of
    any dtype, attention keeps queries, keys, values and its output, and the MLP keeps four times its width. For each
    expert of a token, its input, its output and the weighted output are kept.
    """
    if not size.layers:
        return None
    width = product_width(config.precision)
    numbers = _STATES[config.precision] * size.hidden + 2 * size.queries + 2 * size.keys + 4 * size.intermediate
    layer = tokens * (numbers + 3 * size.experts_per_token * size.hidden) * width
    if config.precision == "bf16_autocast":
        # Autocast keeps the rounded copies of the weights that matrix products used.
        layer += 2 * (size.parameters - size.rest) // size.layers
    # With checkpointing one layer is recomputed at a time. Of the others only the inputs are kept.
    inputs = size.layers * tokens * size.hidden * width
    kept = layer + inputs if config.gradient_checkpointing else layer * size.layers
    # A quarter is added for the gradients of activations.
    return kept * 5 // 4


def _head_bytes(size: ModelSize, tokens: int, config: TrainConfig, gpu: bool) -> int:
    """Return the bytes of the output layer in the backward pass: a chunk's logits, and the weight gradient in
    float32.
    """
    is_fused = gpu and config.kernels != "plain"
    logits = _logits(size, tokens, product_width(config.precision), gpu, is_fused)
    return logits + 4 * size.vocabulary * size.hidden


def _logits(size: ModelSize, tokens: int, width: int, gpu: bool, is_fused: bool = False) -> int:
    """Return the bytes of the logits of a chunk, as components/models/head.py cuts them, and of their gradient.

    Fused kernels have chunks of 8 times the size and replace logits by their gradient. If there is a single chunk, its
    logits are kept for the backward pass, which copies them.
    """
    most, least = (2**27, 512) if gpu else (2**24, 256)
    if is_fused:
        most *= 8
    rows = min(tokens, max(least, most // max(1, size.vocabulary)))
    copies = 2
    if is_fused and rows < tokens:
        copies = 1
    return copies * width * size.vocabulary * rows

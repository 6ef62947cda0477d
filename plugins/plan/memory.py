"""How much memory a model takes where it is trained, frozen or sampled from: arithmetic, before anything is loaded.

Nothing here needs torch, and nothing is invented: what neither weight files nor a known architecture tell is None.
scripts/bench_plan.py compares the numbers with processes on a CPU. Those of GPUs are computed, not measured.

A device is shared in phases, and its peak is that of the largest: responses are generated, then the models that learn
and judge work, then weights go to the engines. What sleeps is not there in the phases of others (`phases`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from components.generate.config import PagedRolloutConfig, RolloutConfig
from components.models.size import ModelSize
from components.train.config import TrainConfig, product_type, weight_type
from components.train.memory_sizes import CONTEXT_BYTES, ZERO_NUMBERS
from plugins.plan.communication import sent_bytes

PROCESS_BYTES = {"driver": 250_000_000, "process": 400_000_000, "vllm": 1_100_000_000}
"""Of an interpreter with its libraries, as proportional set size: of the driver, of a process with torch, with vLLM."""
NCCL_BYTES = 1_000_000_000
"""Of a GPU's memory for the buffers of a group of processes. Between 0.5 GB (2 GPUs) and 1.6 GB (8) are reported, see
issues 864 and 964 of NVIDIA/nccl."""
GRAPH_BYTES = 1_000_000_000
"""Of a GPU's memory for vLLM's CUDA graphs: a round number, as users report 0.2 to 1 GB. They stay while an engine
sleeps."""
BUCKET_BYTES = 256 * 2**20
"""Weights travel between files, ranks and engines in such parts at most, of which two are there at a time."""
VLLM_TOKENS = 16384
"""That vLLM reads at a time, at most."""
_REDUCED = 500_000_000
"""Gradients that DeepSpeed reduces at a time with zero_stage 0."""
_WIDTH = {"float32": 4, "bfloat16": 2}
_STATES = {"fp32": 7, "bf16": 9, "bf16_autocast": 14}
"""Of a token's state, what a layer keeps for the backward pass, in numbers of the matrix products' width."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that one process of a role takes where it computes: a GPU's memory, or the machine's where there is none.

    None: not known.
    """

    weights: int | None = 0
    gradients: int | None = 0
    optimizer: int | None = 0
    """With the float32 master weights."""
    cache: int | None = 0
    """Of keys and values."""
    passes: int | None = 0
    """Beside these at most, while it works: activations, logits, gathered parameters, gradients on their way."""
    base: int = PROCESS_BYTES["process"]
    """Of interpreter and libraries; on a GPU of its context, NCCL's buffers and CUDA graphs."""
    let_go: int = 0
    """Of the gradients, what is there in training alone."""
    host: int = 0
    """On the machine, where the rest is on a GPU: what is offloaded, or sleeps there."""
    loading: int = 0
    """On the machine besides, only while the model is made."""
    first: int = 0
    """Rank 0 besides, on the machine: a moving average."""
    published: int = 0
    """Weights for the engines that sample, in the machine's shared memory, or on disk where that is full."""
    grows: bool = False
    """The cache follows from the longest sequences that there may be, and is not taken before there are."""
    sleeps: bool = False
    """All but its base is given back while other roles that share the device work."""
    generates: bool = False
    """It works while responses are generated, and other roles after that."""
    share: int = 0
    """What vLLM may take of a GPU; 0: not known, or there is none."""
    short: int = 0
    """What this lacks for its weights, one sequence and what vLLM needs besides."""
    sends: Mapping[str, int] = field(default_factory=dict)
    """To other ranks in an optimizer step, at most, by the axis of the ranks."""
    parts: tuple[Need, ...] = ()
    """Where one process does several things, what each of them takes."""

    @property
    def certain(self) -> int:
        """What it takes in any case."""
        parts = [self.weights, self.gradients, self.optimizer, 0 if self.grows else self.cache]
        return sum(part or 0 for part in parts)

    @property
    def brief(self) -> int:
        """What it takes besides while it works, at most, as far as known."""
        return (self.passes or 0) + ((self.cache or 0) if self.grows else 0)

    @property
    def total(self) -> int:
        """All of it, as far as known."""
        return self.base + self.certain + self.brief

    @property
    def is_known(self) -> bool:
        """Whether nothing of it is unknown."""
        return None not in (self.weights, self.gradients, self.optimizer, self.cache, self.passes)


def together(*needs: Need) -> Need:
    """Of one process that does all of these, one after the other, and keeps what each of them takes."""
    sums: dict[str, int | None] = {}
    for name in ("weights", "gradients", "optimizer", "cache"):
        amounts = [getattr(need, name) for need in needs]
        sums[name] = None if None in amounts else sum(amounts)
    passes = [need.passes for need in needs]
    return Need(
        **sums,
        passes=None if None in passes else max(count or 0 for count in passes),
        base=max(need.base for need in needs),
        let_go=sum(need.let_go for need in needs),
        host=sum(need.host for need in needs),
        loading=max(need.loading for need in needs),
        first=sum(need.first for need in needs),
        published=sum(need.published for need in needs),
        grows=any(need.grows for need in needs),
        sleeps=all(need.sleeps for need in needs),
        generates=all(need.generates for need in needs),
        share=max(need.share for need in needs),
        short=max(need.short for need in needs),
        sends=sum((Counter(need.sends) for need in needs), Counter[str]()),
        parts=tuple(part for need in needs for part in need.parts or (need,)),
    )


@dataclass(frozen=True)
class Phase:
    """What is on one device at the same time, without contexts."""

    name: str
    certain: int
    """Bytes that are taken in any case."""
    brief: int
    """Bytes that are taken besides, at most: of roles that work one after the other the largest."""

    @property
    def most(self) -> int:
        """All of it."""
        return self.certain + self.brief


def phases(needs: Iterable[Need]) -> list[Phase]:
    """The phases of a step on a device that processes with these needs share, in their order."""
    parts = [part for need in needs for part in need.parts or (need,)]
    engines = [part for part in parts if part.generates]
    others = [part for part in parts if not part.generates]
    learning = sum(part.certain for part in parts if not (part.sleeps and part.generates))
    idle = sum(part.certain - part.let_go for part in others if not part.sleeps)
    generating = idle + sum(part.certain for part in engines)
    found = list[Phase]()
    if engines:
        found.append(Phase("generation", generating, max(part.brief for part in engines)))
    if others:
        found.append(Phase("training" if engines else "work", learning, max(part.brief for part in others)))
    if engines and any(part.published for part in others):
        # Engines that sleep have their weights again before they have a cache.
        woken = sum((part.weights or 0) if part.sleeps else part.certain for part in engines)
        learned = sum(part.certain - part.let_go for part in others)
        found.append(Phase("weight sync", learned + woken, 2 * BUCKET_BYTES))
    return found


def learning(
    size: ModelSize | None, config: TrainConfig, ranks: int, longest: int, sequences: int, **options: bool
) -> Need:
    """Bytes of rank 0 of a model that is trained on so many sequences in an optimizer step, of at most `longest`
    tokens; options as in `training`.

    Raises:
        ValueError: the ranks, or the model's heads or experts, cannot be shared out as the configuration says.
    """
    if size is not None:
        _check_axes(size, config)
    own = -(-sequences // config.data_ranks(ranks))
    tokens = micro_batch_tokens(config, longest, own)
    several = steps_in_parts(config, longest, own)
    need = training(size, config, ranks, tokens=-(-tokens // config.context), several=several, **options)
    size = size if size is None or options.get("has_head", True) else size.without_head
    trained = None if size is None else _trained(size, config)
    if size is None or trained is None or not size.layers:
        return need
    stretch, passes = -(-own * longest // config.context), -(-own * longest // tokens)
    return replace(need, sends=sent_bytes(size, config, ranks, trained=trained, tokens=stretch, passes=passes))


def _check_axes(size: ModelSize, config: TrainConfig) -> None:
    axes = {"context": config.context, "tensor": config.tensor}
    given = " x ".join(f"parallel.{axis}={number}" for axis, number in axes.items() if number > 1)
    if size.heads % (config.context * config.tensor):
        raise ValueError(f"{given} does not divide the model's {size.heads} attention heads; set a divisor")
    if config.expert > 1 and size.layers and not size.experts:
        raise ValueError(f"parallel.expert={config.expert}: the model's layers have no experts; set 1")
    if size.experts % config.expert:
        raise ValueError(
            f"parallel.expert={config.expert} does not divide the {size.experts} experts of the model's layers; set a "
            "divisor"
        )


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
) -> Need:
    """Bytes of rank 0 of a model that is trained.

    Args:
        size: of the model.
        config: of the engine.
        ranks: over which it is partitioned.
        tokens: of the largest micro-batch that there can be.
        several: an optimizer step may have several micro-batches.
        gpu: it computes there.
        publishes: rank 0 hands the weights to engines that sample, and keeps two versions of them.
        has_head: it has an output layer over the vocabulary; values and scores have none.
        sleeps: it goes to host memory while others work.
    """
    size = size if size is None or has_head else size.without_head
    trained = None if size is None else _trained(size, config)
    base = (CONTEXT_BYTES + NCCL_BYTES * (ranks > 1)) if gpu else PROCESS_BYTES["process"]
    if size is None or trained is None:
        return Need(weights=None, gradients=None, optimizer=None, passes=None, base=base, sleeps=sleeps)
    whole, of_all = size, trained
    if config.tensor > 1:
        # A rank has a model of its own, smaller and over fewer ranks.
        size, ranks = size.cut(config.tensor), ranks // config.tensor
        trained = size.parameters
    work = _Training(size, config, ranks, trained, several, gpu)
    weights, gradients, optimizer = work.kept()
    host = 0
    if config.adam_offload and gpu:
        host, optimizer = optimizer + 4 * trained // ranks, 0
        # Those that are not partitioned wait on the GPU for the end of the step.
        gradients = gradients if config.stage < 2 else 0
        if config.engine == "fsdp":
            host, weights = host + weights, 0
    # ZeRO 3 keeps a buffer for them.
    let_go = gradients if config.engine == "fsdp" or config.stage < 3 else 0
    if sleeps:
        host += weights + gradients - let_go + optimizer
    activations = _activations(size, tokens, config)
    passes = None
    if activations is not None:
        head = _head_bytes(size, tokens, config, gpu) * has_head + work.gathered_rest()
        passes = max(activations + max(head, work.backward(size.vocabulary * size.hidden * has_head)), work.step())
    return Need(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        passes=passes,
        base=base,
        let_go=let_go,
        host=host,
        loading=min(2 * BUCKET_BYTES, 4 * whole.parameters) * gpu,
        first=4 * of_all * (config.ema_beta is not None),
        published=2 * work.width * whole.parameters * publishes,
        sleeps=sleeps,
    )


@dataclass(frozen=True)
class _Training:
    """The parameters of a model under an engine."""

    size: ModelSize
    config: TrainConfig
    ranks: int
    trained: int
    """Parameters of it, or of adapters, that are trained."""
    several: bool
    gpu: bool

    @property
    def width(self) -> int:
        """Bytes of a number of the weights in passes."""
        return 2 if self.config.precision == "bf16" else 4

    @property
    def bucket(self) -> int:
        """Numbers of DeepSpeed's buffers."""
        return ZERO_NUMBERS["cuda" if self.gpu else "cpu"]

    @property
    def whole(self) -> int:
        """Parameters that a pass needs here: of experts that ranks share the own ones."""
        experts = self.size.expert_parameters
        return self.size.parameters - (experts - experts // self.config.expert)

    @property
    def layer(self) -> int:
        """Parameters of a layer that a pass needs here."""
        return (self.whole - self.size.rest) // max(1, self.size.layers)

    def kept(self) -> tuple[int, int, int]:
        """Weights, gradients and the optimizer's states, between two steps or at the end of one."""
        width, stage, ranks = self.width, self.config.stage, self.ranks
        whole = self.size.parameters + (self.trained if self.config.lora_rank else 0)
        if self.config.engine == "fsdp":
            return 4 * whole // ranks, 4 * self.trained // ranks, 8 * self.trained // ranks
        weights = width * whole // (ranks if stage == 3 else 1)
        gradients = 4 * self.trained // (ranks if stage >= 2 else 1)
        return weights, gradients, 8 * self.trained if stage == 0 else 12 * self.trained // ranks

    def gathered_rest(self) -> int:
        """What no layer has, gathered for a whole pass."""
        return self.width * self.size.rest if self.config.engine == "fsdp" else 0

    def backward(self, head: int) -> int:
        """Gathered parameters and gradients on their way, while activations are there.

        Args:
            head: numbers of the output layer, whose gradient comes first and waits for the end; 0 without one.
        """
        width, stage = self.width, self.config.stage
        if self.config.engine == "fsdp":
            adapters = self.config.lora_rank > 0
            own = self.trained // max(1, self.size.layers) if adapters else self.layer
            # A layer's gradient, and its copy in float32 that is reduced.
            gradients = (width + 4) * own + (0 if adapters else width * head)
            if stage < 3:
                # The gradients of all micro-batches but the last are added up in float32, whole; rows come of the last.
                whole = self.trained if adapters else self.whole
                added = 4 * (whole - self.trained // self.ranks) * self.several
                return width * self.whole + added + gradients
            # Of the layers one computes, and the next one is on its way.
            return self.gathered_rest() + 2 * width * self.layer + gradients
        # Gradients wait for each other in a buffer, which a GPU is asked for as a whole. ZeRO 1 fills it at the end.
        buffer = width * (self.bucket if self.gpu else min(self.trained, self.bucket))
        if stage < 2:
            return buffer * stage * self.gpu
        # One that is larger than the buffer goes alone.
        waiting = width * min(self.trained, max(self.bucket, head))
        at_once = max(self.bucket, 2 * self.layer) + self.size.rest
        gathered = width * min(self.size.parameters, at_once) if stage == 3 and self.ranks > 1 else 0
        return waiting + buffer + gathered

    def step(self) -> int:
        """What the end of a step takes, when activations have gone: gradients that are reduced, and their copies in
        float32 for the optimizer.
        """
        if self.config.engine == "fsdp":
            return 0 if self.config.lora_rank else (2 * self.width + 4) * self.size.rest
        own = self.trained // self.ranks
        if self.config.stage == 0:
            return 4 * min(self.trained, _REDUCED)
        if self.config.stage == 1:
            return 4 * own + self.width * (self.bucket if self.gpu else min(self.trained, self.bucket))
        return 4 * (own if self.config.stage == 2 else min(own, self.bucket))


def frozen(
    size: ModelSize | None,
    precision: str,
    *,
    tokens: int,
    gpu: bool = False,
    has_head: bool = True,
    layout: str = "whole",
    ranks: int = 1,
) -> Need:
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
        return Need(weights=None, passes=None, base=base)
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
    return Need(
        weights=0 if waits else weights,
        passes=passes,
        base=base,
        host=weights * waits,
        loading=min(2 * BUCKET_BYTES, weights) * gpu,
    )


def sampling(
    size: ModelSize | None, config: RolloutConfig, rows: int, tokens: int, device_bytes: int | None, *, gpu: bool
) -> Need:
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
        return Need(weights=weights, cache=None, passes=None, base=base, loading=loading, generates=True)
    rows = min(rows, config.max_num_seqs)
    return Need(
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
) -> Need:
    """Of an engine of vLLM, whose cache has what is left of its share."""
    width, parts = _WIDTH[config.dtype], config.tensor_parallel_size
    weights = None if size is None else width * size.parameters
    if not gpu:
        cache, base = int(config.cpu_cache_gb * 2**30), PROCESS_BYTES["vllm"] * parts
        return Need(weights=weights, cache=cache, base=base, generates=True)
    base = CONTEXT_BYTES + GRAPH_BYTES * (not config.enforce_eager) + NCCL_BYTES * (parts > 1)
    # While it sleeps its weights are on the machine.
    host = (weights or 0) * config.enable_sleep
    known = {"base": base, "sleeps": config.enable_sleep, "host": host, "generates": True}
    weights = None if weights is None else weights // parts
    if device_bytes is None or weights is None or size is None:
        return Need(weights=weights, cache=None, passes=None, **known)
    passes = _vllm_pass(size, min(rows, config.max_num_seqs), width, parts)
    longest = 2 * size.layers * size.keys * width * tokens // parts
    share = int(config.gpu_memory_utilization * device_bytes)
    left = share - base - weights - passes
    short = max(longest - left, 0)
    return Need(weights=weights, cache=max(left, 0), passes=passes, share=share, short=short, **known)


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

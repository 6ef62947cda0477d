"""How much memory a model takes where it is trained, frozen or sampled from: arithmetic, before anything is loaded.

Nothing here needs torch, and nothing is invented: what neither weight files nor a known architecture tell is None. The
numbers were compared with runs, on a CPU, of models of 0.4 and 75 million parameters, and were within a quarter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.data.tasks import get_task
from components.engines.config import HFRolloutConfig, RolloutConfig, TrainConfig

PROCESS_BYTES = {"driver": 250_000_000, "process": 400_000_000, "vllm": 1_100_000_000}
"""Of an interpreter with its libraries, as proportional set size: of the driver, of a process with torch, with vLLM."""
CONTEXT_BYTES = 600_000_000
"""Of a GPU's memory for what a process with torch has there before its first tensor."""
TASK_MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""Shape of the models that are still to be made for a task: components/data/tiny_model.py."""
_KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose number of parameters follows from config.json alone."""
_GATHERED = 1_000_000_000
"""Numbers that DeepSpeed gathers at the same time with zero_stage 3, at most; half as many it reduces at a time."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Numbers of a model."""

    parameters: int
    head: int = 0
    """Those of them that are an output layer of its own; 0 where it is the embedding's."""
    layers: int = 0
    """Of a decoder; 0: another architecture, of which only the weights are known."""
    hidden: int = 0
    queries: int = 0
    """Numbers of a token's queries in a layer, all heads together."""
    keys: int = 0
    """The same of keys; values have as many."""
    intermediate: int = 0
    vocabulary: int = 0
    positions: int = 0
    """Tokens of a sequence, at most; 0: any."""

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Numbers that go in and come out of each linear layer of a decoder layer."""
        wide, narrow = self.queries, self.keys
        found = {"q_proj": (self.hidden, wide), "k_proj": (self.hidden, narrow), "v_proj": (self.hidden, narrow)}
        found |= {"o_proj": (wide, self.hidden), "down_proj": (self.intermediate, self.hidden)}
        return found | dict.fromkeys(("gate_proj", "up_proj"), (self.hidden, self.intermediate))


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
    """Beside these within a forward and backward pass, at most: activations, logits, gathered parameters."""
    base: int = PROCESS_BYTES["process"]
    """Of interpreter and libraries."""
    host: int = 0
    """On the machine, where the rest is on a GPU: what is offloaded, or sleeps there."""
    first: int = 0
    """Rank 0 besides, on the machine: a moving average."""
    published: int = 0
    """Weights for the engines that sample, in the machine's shared memory, or on disk where that is full."""
    grows: bool = False
    """The cache follows from the longest sequences that there may be, and is not taken before there are."""
    sleeps: bool = False
    """All of it is given back while other roles that share the device work."""
    share: int = 0
    """What vLLM may take of a GPU; 0: not known, or there is none."""
    short: int = 0
    """What this lacks for its weights alone."""

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
    """Of one process that does all of these, and keeps what each of them takes."""
    sums: dict[str, int | None] = {}
    for name in ("weights", "gradients", "optimizer", "cache"):
        parts = [getattr(need, name) for need in needs]
        sums[name] = None if None in parts else sum(parts)
    passes = [need.passes for need in needs]
    return Need(
        **sums,  # pyright: ignore[reportArgumentType]
        passes=None if None in passes else max(count or 0 for count in passes),
        base=max(need.base for need in needs),
        host=sum(need.host for need in needs),
        first=sum(need.first for need in needs),
        published=sum(need.published for need in needs),
        grows=any(need.grows for need in needs),
        share=max(need.share for need in needs),
        short=max(need.short for need in needs),
    )


def model_size(path: str) -> ModelSize | None:
    """Numbers of the model in a folder or the hub's local cache, or of one that is still to be made for a task.

    Args:
        path: as a recipe is given it; after a colon, of `warm_start:` and `new:`, a task's name.

    Returns:
        None where nothing is known.
    """
    kind, _, task = path.partition(":")
    if kind in ("warm_start", "new"):
        try:
            found = get_task(task)
        except ValueError:
            return None
        # Three marks beside the characters, or as many tokens as it says.
        return _from_config(TASK_MODEL | {"vocab_size": found.vocabulary or len(found.alphabet) + 3})
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = _cached(path)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        stored = _stored(folder)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None  # the recipe's own checks say what is wrong with it
    by_config = _from_config(config)
    if stored is None:
        return by_config
    shape = vars(by_config) if by_config else {}
    return ModelSize(**{**shape, "parameters": stored[0], "head": stored[1]})


def training(
    size: ModelSize | None,
    config: TrainConfig,
    ranks: int,
    *,
    tokens: int,
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
        gpu: it computes there.
        publishes: rank 0 hands the weights to engines that sample, and keeps two versions of them.
        has_head: it has an output layer over the vocabulary; values and scores have none.
        sleeps: it goes to host memory while others work.
    """
    trained = None if size is None else _trained(size, config)
    base = CONTEXT_BYTES if gpu else PROCESS_BYTES["process"]
    if size is None or trained is None:
        return Need(weights=None, gradients=None, optimizer=None, passes=None, base=base, sleeps=sleeps)
    count = size.parameters - (0 if has_head else size.head)
    trained = count if trained == size.parameters else trained
    stage, width, adapters = config.stage, (2 if config.precision == "bf16" else 4), trained if config.lora_rank else 0
    if config.engine == "fsdp":
        weights, gradients, optimizer = 4 * (count + adapters) // ranks, 4 * trained // ranks, 8 * trained // ranks
        # What no layer has stays; of the layers one computes, the next one is on its way, and one has its gradient.
        rest, layers = size.vocabulary * size.hidden + size.head * has_head, max(1, size.layers)
        kept = count + trained if stage < 3 else rest + 2 * (count - rest) // layers + trained // layers
        gathered = width * kept
    else:
        weights = width * (count + adapters) // (ranks if stage == 3 else 1)
        gradients = 4 * trained // (ranks if stage >= 2 else 1)
        optimizer = 8 * trained if stage == 0 else 12 * trained // ranks
        # Gradients wait for each other in a buffer, which a GPU is asked for as a whole.
        most = _GATHERED // 2
        gathered = 0 if stage == 0 else width * (min(trained, most) + (most if gpu else min(trained, most)))
        gathered += width * min(count, _GATHERED) if stage == 3 and ranks > 1 else 0
    host, first = 0, 4 * trained * (config.ema_beta is not None)
    if config.adam_offload and gpu:
        host, optimizer = optimizer + 4 * trained // ranks, 0
        # Those that are not partitioned wait on the GPU for the end of the step.
        gradients = gradients if stage < 2 else 0
        if config.engine == "fsdp":
            host, weights = host + weights, 0
    if sleeps:
        host += weights + gradients + optimizer
    within = _pass_bytes(size, tokens, config, gpu, has_head)
    passes = None if within is None else within + gathered
    here = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "passes": passes}
    published = 2 * width * count * publishes
    return Need(**here, base=base, host=host, first=first, published=published, sleeps=sleeps)


def frozen(size: ModelSize | None, dtype: str, *, tokens: int, gpu: bool = False, has_head: bool = True) -> Need:
    """Bytes of a model that is only evaluated; arguments as in `training`, `dtype` of the weights."""
    base = CONTEXT_BYTES if gpu else PROCESS_BYTES["process"]
    if size is None:
        return Need(weights=None, passes=None, base=base)
    width = _WIDTH[dtype]
    count = size.parameters - (0 if has_head else size.head)
    # Of one layer at a time, nothing kept.
    layer = tokens * (4 * size.hidden + 3 * size.intermediate) * width
    passes = None if not size.layers else layer + (_logits(size, tokens, width, gpu) if has_head else 0)
    return Need(weights=width * count, passes=passes, base=base)


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
    width = _WIDTH[config.dtype]
    is_hf = isinstance(config, HFRolloutConfig)
    base = CONTEXT_BYTES if gpu else PROCESS_BYTES["process" if is_hf else "vllm"]
    weights = None if size is None else width * size.parameters
    if is_hf:
        if size is None or not size.layers:
            return Need(weights=weights, cache=None, passes=None, base=base)
        rows = min(rows, config.max_num_seqs)
        cache = rows * tokens * 2 * size.layers * size.keys * width
        return Need(weights=weights, cache=cache, passes=2 * rows * size.vocabulary * 4, base=base, grows=True)
    assert not isinstance(config, HFRolloutConfig)
    parts = config.tensor_parallel_size
    if not gpu:
        return Need(weights=weights, cache=int(config.cpu_cache_gb * 2**30), base=base * parts)
    # While it sleeps its weights are on the machine.
    asleep = {"sleeps": config.enable_sleep, "host": (weights or 0) * config.enable_sleep}
    weights = None if weights is None else weights // parts
    if device_bytes is None or weights is None:
        return Need(weights=weights, cache=None, base=base, **asleep)
    share = int(config.gpu_memory_utilization * device_bytes)
    left = share - weights - base
    return Need(weights=weights, cache=max(left, 0), base=base, share=share, short=max(-left, 0), **asleep)


_WIDTH = {"float32": 4, "bfloat16": 2}


def micro_batch_tokens(config: TrainConfig, longest: int, sequences: int) -> int:
    """Tokens of the largest micro-batch there can be.

    Args:
        config: of the engine, which cuts by tokens, by sequences, or both.
        longest: tokens of a sequence, at most.
        sequences: of an optimizer step on one rank.
    """
    return max(longest, min(config.max_tokens, min(config.max_sequences or sequences, sequences) * longest))


def _trained(size: ModelSize, config: TrainConfig) -> int | None:
    """Parameters that are trained; None where adapters go to layers that are not known."""
    if not config.lora_rank:
        return size.parameters
    if not size.layers:
        return None
    wanted: Collection[str] = [name.strip() for name in config.lora_target_modules.split(",")]
    chosen = [name for name in size.linears if "all-linear" in wanted or any(w.endswith(name) for w in wanted)]
    return config.lora_rank * size.layers * sum(sum(size.linears[name]) for name in chosen) if chosen else None


def _pass_bytes(size: ModelSize, tokens: int, config: TrainConfig, gpu: bool, has_head: bool) -> int | None:
    """Activations that are kept for the backward pass, and the logits of a chunk.

    Per token and layer as counted in transformers' Llama-like layers: norms compute in float32 whatever the weights
    are, the attention keeps queries, keys, values and its output for all query heads, and the MLP four of its width.
    """
    if not size.layers:
        return None
    width = 4 if config.precision == "fp32" else 2
    layer = ((7 if width == 4 else 9) * size.hidden + 4 * size.queries + 4 * size.intermediate) * width
    kept = layer + size.layers * size.hidden * width if config.gradient_checkpointing else layer * size.layers
    # A quarter more for the gradients of activations.
    return tokens * kept * 5 // 4 + (_logits(size, tokens, width, gpu) + 4 * size.vocabulary * size.hidden) * has_head


def _logits(size: ModelSize, tokens: int, width: int, gpu: bool) -> int:
    """Of a chunk, as components/engines/head_logprobs.py cuts them, and of their gradient."""
    most, rows = (2**27, 512) if gpu else (2**24, 256)
    return 2 * width * size.vocabulary * min(tokens, max(rows, most // max(1, size.vocabulary)))


def _from_config(config: dict[str, Any]) -> ModelSize | None:
    """Sizes of a dense decoder like Llama; None of any other."""
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    kind = config.get("model_type")
    if kind not in _KNOWN or not all(isinstance(config.get(name), int) for name in needed):
        return None
    hidden, layers, heads, intermediate, vocabulary = (int(config[name]) for name in needed)
    head_size = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_size, (config.get("num_key_value_heads") or heads) * head_size
    vectors = {"qwen2": queries + 2 * keys, "qwen3": 2 * head_size}.get(kind, 0)
    vectors += queries + 2 * keys + hidden if config.get("attention_bias") and kind != "qwen2" else 0
    vectors += 2 * intermediate + hidden if config.get("mlp_bias") else 0
    layer = 2 * hidden * (queries + keys) + 3 * hidden * intermediate + 2 * hidden + vectors
    head = 0 if config.get("tie_word_embeddings") else vocabulary * hidden
    return ModelSize(
        parameters=vocabulary * hidden + head + layers * layer + hidden,
        head=head,
        layers=layers,
        hidden=hidden,
        queries=queries,
        keys=keys,
        intermediate=intermediate,
        vocabulary=vocabulary,
        positions=int(config.get("max_position_embeddings") or 0),
    )


def _stored(folder: Path) -> tuple[int, int] | None:
    """Parameters in the weight files of a folder, and those of its output layer, from their headers; None without such
    files, or where one of them is missing.
    """
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    count = head = 0
    for name in names:
        if not (folder / name).is_file():
            return None
        with (folder / name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for tensor, entry in header.items():
            numbers = 0 if tensor == "__metadata__" else math.prod(entry["shape"])
            count += numbers
            head += numbers if tensor == "lm_head.weight" else 0
    return count, head


def _cached(name: str) -> Path:
    """Where the hub's library keeps the newest model of this name that it has; it may not be there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:
        found = None
    return Path(found).parent if isinstance(found, str) else Path(name)

"""The tables of docs/large_models.md: what published models take on 1 to 32 GPUs, term by term.

    python scripts/plan_table.py            write them into the page
    python scripts/plan_table.py --check    exit 1 if the page has others

The arithmetic is that of `--dry_run` (plugins/plan/memory.py), of one layout for all: see the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from components.models.size import ModelSize, size_of  # noqa: E402
from components.train.config import TrainConfig  # noqa: E402 (may not be installed)
from plugins.plan.memory import (  # noqa: E402
    MemoryEstimate,
    frozen,
    phases,
    sampling,
    training,
)
from plugins.vllm.config import VLLMRolloutConfig  # noqa: E402 (may not be installed)

PAGE = ROOT / "docs/large_models.md"
BEGIN, END = "<!-- {name}: written by scripts/{script} -->", "<!-- end of {name} -->"
SHAPES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def qwen2(*shape: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    """config.json of a model of the Qwen2.5 family."""
    named = dict(zip(SHAPES, shape, strict=True))
    return {"model_type": "qwen2", "vocab_size": vocabulary, "tie_word_embeddings": tied} | named


MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": qwen2(896, 24, 14, 2, 4864, vocabulary=151936, tied=True),
    "Qwen2.5-1.5B": qwen2(1536, 28, 12, 2, 8960, vocabulary=151936, tied=True),
    "Qwen2.5-7B": qwen2(3584, 28, 28, 4, 18944, vocabulary=152064, tied=False),
    "Qwen2.5-32B": qwen2(5120, 64, 40, 8, 27648, vocabulary=152064, tied=False),
    "Qwen2.5-72B": qwen2(8192, 80, 64, 8, 29568, vocabulary=152064, tied=False),
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}
"""Of each published config.json what decides about its size."""
DEVICES = (1, 8, 16, 32)
MEMORIES = (80, 141)
PER_NODE = 8
LONGEST, TOKENS, SEQUENCES = 5120, 16384, 512
"""Tokens of the longest sequence and of a micro-batch, and responses of a step."""
SHARE = 0.7
"""Of a GPU's memory, what vLLM may take while the policy sleeps."""
TRAIN = TrainConfig(engine="fsdp", zero_stage=3, precision="bf16", gradient_checkpointing=True, packing=True)


@dataclass(frozen=True)
class Layout:
    """A policy, its engines and a reference that share all devices."""

    devices: int
    actor: MemoryEstimate
    engine: MemoryEstimate
    reference: MemoryEstimate
    parallel: int
    """Devices of an engine."""

    @property
    def needs(self) -> tuple[MemoryEstimate, MemoryEstimate, MemoryEstimate]:
        return self.actor, self.engine, self.reference

    @property
    def base(self) -> int:
        """Contexts, NCCL's buffers and CUDA graphs of all three."""
        return sum(need.base for need in self.needs)

    def peaks(self) -> dict[str, int]:
        """Of a GPU in each phase."""
        return {phase.name: self.base + phase.most for phase in phases(self.needs)}

    def fits(self, device_bytes: int) -> str:
        """A verdict."""
        if self.engine.short:
            return "no: an engine's weights"
        over = {name: peak for name, peak in self.peaks().items() if peak > device_bytes}
        return f"no: {max(over, key=lambda name: over[name])}" if over else "yes"

    def node(self) -> int:
        """Memory of the machine that rank 0 is on: what sleeps there, and what is there while a state is written."""
        ranks = min(PER_NODE, self.devices)
        engines = max(1, ranks // self.parallel)
        processes = sum(400_000_000 * count for count in (ranks, engines, ranks)) + 650_000_000
        asleep = ranks * self.actor.host + engines * self.engine.host
        # Two versions of the weights are there while the engines read the newer one.
        return processes + asleep + self.actor.published + ranks * max(self.actor.loading, self.reference.loading)


def layout(size: ModelSize, devices: int, device_bytes: int) -> Layout:
    """The layout of so many devices, with the least devices of an engine that hold its weights."""
    parallel, engine = 1, _engine(size, devices, 1, device_bytes)
    while engine.short and 2 * parallel <= min(devices, PER_NODE):
        parallel *= 2
        engine = _engine(size, devices, parallel, device_bytes)
    actor = training(size, TRAIN, devices, tokens=TOKENS, several=True, gpu=True, publishes=True, sleeps=True)
    sharding = "sharded" if devices > 1 else "whole"
    reference = frozen(size, "bf16", tokens=TOKENS, gpu=True, layout=sharding, ranks=devices)
    return Layout(devices, actor, engine, reference, parallel)


def _engine(size: ModelSize, devices: int, parallel: int, device_bytes: int) -> MemoryEstimate:
    config = VLLMRolloutConfig(
        dtype="bfloat16", tensor_parallel_size=parallel, gpu_memory_utilization=SHARE, enable_sleep=True
    )
    return sampling(size, config, SEQUENCES * parallel // devices, LONGEST, device_bytes, gpu=True)


def gigabytes(count: int | None) -> str:
    """Of a cell: decimal, two digits, and one behind the point at most."""
    value = (count or 0) / 1e9
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def terms() -> Iterator[Sequence[object]]:
    """A row of each model and number of devices: what one GPU of 80 GB has of each term, and its phases."""
    for name, config in MODELS.items():
        size = size_of(config)
        assert size is not None
        for devices in DEVICES:
            found = layout(size, devices, 80 * 10**9)
            actor, peaks = found.actor, found.peaks()
            parts = (actor.weights, actor.gradients, actor.optimizer, actor.passes, found.reference.weights)
            engine = (found.engine.weights, found.base)
            at_peak = (peaks["training"], peaks["weight sync"], found.node())
            yield name, devices, found.parallel, *map(gigabytes, (*parts, *engine, *at_peak))


def verdicts() -> Iterator[Sequence[object]]:
    """A row of each model: whether it fits, by devices and their memory."""
    for name, config in MODELS.items():
        size = size_of(config)
        assert size is not None
        cells = [layout(size, devices, m * 10**9).fits(m * 10**9) for m in MEMORIES for devices in DEVICES]
        yield name, f"{size.parameters / 1e9:.2f}", *cells


def written(head: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def tables() -> dict[str, str]:
    """The page's tables, by name."""
    named = [f"{devices} x {memory} GB" for memory in MEMORIES for devices in DEVICES]
    head = ["model", "GPUs", "tensor_parallel", "weights", "gradients", "optimizer", "passes", "reference"]
    head += ["engine's weights", "contexts", "training", "weight sync", "first node"]
    return {
        "verdicts": written(["model", "parameters (10^9)", *named], verdicts()),
        "terms": written(head, terms()),
    }


def with_tables(text: str) -> str:
    """The page with these tables in it."""
    return filled(text, tables(), "plan_table.py")


def filled(text: str, named: Mapping[str, str], script: str) -> str:
    """A page with tables of a script between the marks that have their names."""
    for name, table in named.items():
        begin, end = BEGIN.format(name=name, script=script), END.format(name=name)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    found = with_tables(text)
    if "--check" in sys.argv:
        return int(found != text)
    PAGE.write_text(found, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the tables of docs/large_models.md: memory of published models on 1 to 32 GPUs, term by term.

    python scripts/plan_table.py            write the tables into the page
    python scripts/plan_table.py --check    exit with 1 if the page is not up to date

The arithmetic is that of `--dry_run` (plugins/plan/memory.py), with one layout for all models; see the page.
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
BEGIN = "<!-- {name}: written by scripts/{script} -->"
END = "<!-- end of {name} -->"
SHAPES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def qwen2(*shape: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    """Return the config.json of a model of the Qwen2.5 family."""
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
"""Model -> the entries of its published config.json that determine its size."""
DEVICES = (1, 8, 16, 32)
MEMORIES = (80, 141)
PER_NODE = 8
LONGEST = 5120
"""Maximum number of tokens in a sequence."""
TOKENS = 16384
"""Number of tokens in a micro-batch."""
SEQUENCES = 512
"""Number of responses per step."""
SHARE = 0.7
"""Share of the GPU memory that vLLM may use while the policy sleeps."""
TRAIN = TrainConfig(engine="fsdp", zero_stage=3, precision="bf16", gradient_checkpointing=True, packing=True)


@dataclass(frozen=True)
class Layout:
    """Memory of a policy, its engines and a reference model that share all devices."""

    devices: int
    actor: MemoryEstimate
    engine: MemoryEstimate
    reference: MemoryEstimate
    parallel: int
    """Number of devices per engine."""

    @property
    def needs(self) -> tuple[MemoryEstimate, MemoryEstimate, MemoryEstimate]:
        """Estimates of the three roles."""
        return self.actor, self.engine, self.reference

    @property
    def base(self) -> int:
        """Bytes of the CUDA contexts, NCCL buffers and CUDA graphs of the three roles."""
        return sum(need.base for need in self.needs)

    def peaks(self) -> dict[str, int]:
        """Return phase -> peak bytes of a GPU."""
        return {phase.name: self.base + phase.most for phase in phases(self.needs)}

    def fits(self, device_bytes: int) -> str:
        """Return "yes", or "no" with the phase or part that needs too much memory."""
        if self.engine.short:
            return "no: an engine's weights"
        over = {name: peak for name, peak in self.peaks().items() if peak > device_bytes}
        if not over:
            return "yes"
        return f"no: {max(over, key=lambda name: over[name])}"

    def node(self) -> int:
        """Return the host memory of the node of rank 0, in bytes: sleeping roles, published weights, and loading."""
        ranks = min(PER_NODE, self.devices)
        engines = max(1, ranks // self.parallel)
        processes = sum(400_000_000 * count for count in (ranks, engines, ranks)) + 650_000_000
        asleep = ranks * self.actor.host + engines * self.engine.host
        # `published` has two versions of the weights: engines may still read the older one.
        return processes + asleep + self.actor.published + ranks * max(self.actor.loading, self.reference.loading)


def layout(size: ModelSize, devices: int, device_bytes: int) -> Layout:
    """Return the layout on a number of devices. An engine gets the fewest devices that hold its weights."""
    parallel = 1
    engine = _engine(size, devices, parallel, device_bytes)
    # vLLM splits heads evenly, so the number of devices of an engine is doubled; they are all on one node.
    while engine.short and 2 * parallel <= min(devices, PER_NODE):
        parallel *= 2
        engine = _engine(size, devices, parallel, device_bytes)
    actor = training(size, TRAIN, devices, tokens=TOKENS, several=True, gpu=True, publishes=True, sleeps=True)
    sharding = "whole"
    if devices > 1:
        sharding = "sharded"
    reference = frozen(size, "bf16", tokens=TOKENS, gpu=True, layout=sharding, ranks=devices)
    return Layout(devices, actor, engine, reference, parallel)


def _engine(size: ModelSize, devices: int, parallel: int, device_bytes: int) -> MemoryEstimate:
    config = VLLMRolloutConfig(
        dtype="bfloat16", tensor_parallel_size=parallel, gpu_memory_utilization=SHARE, enable_sleep=True
    )
    return sampling(size, config, SEQUENCES * parallel // devices, LONGEST, device_bytes, gpu=True)


def gigabytes(count: int | None) -> str:
    """Return bytes as decimal gigabytes for a cell, with one decimal below 100."""
    value = (count or 0) / 1e9
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}"


def terms() -> Iterator[Sequence[object]]:
    """Yield a row per model and number of devices: each term on a GPU of 80 GB, and its phases."""
    for name, config in MODELS.items():
        size = size_of(config)
        assert size is not None
        for devices in DEVICES:
            plan = layout(size, devices, 80 * 10**9)
            actor = plan.actor
            peaks = plan.peaks()
            parts = (actor.weights, actor.gradients, actor.optimizer, actor.passes, plan.reference.weights)
            engine = (plan.engine.weights, plan.base)
            at_peak = (peaks["training"], peaks["weight sync"], plan.node())
            yield name, devices, plan.parallel, *map(gigabytes, (*parts, *engine, *at_peak))


def verdicts() -> Iterator[Sequence[object]]:
    """Yield a row per model: verdicts by number of devices and their memory."""
    for name, config in MODELS.items():
        size = size_of(config)
        assert size is not None
        cells = [layout(size, devices, m * 10**9).fits(m * 10**9) for m in MEMORIES for devices in DEVICES]
        yield name, f"{size.parameters / 1e9:.2f}", *cells


def written(head: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    """Return a Markdown table."""
    all_rows = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in all_rows)


def tables() -> dict[str, str]:
    """Return name -> table of the page."""
    named = [f"{devices} x {memory} GB" for memory in MEMORIES for devices in DEVICES]
    head = ["model", "GPUs", "tensor_parallel", "weights", "gradients", "optimizer", "passes", "reference"]
    head += ["engine's weights", "contexts", "training", "weight sync", "first node"]
    return {
        "verdicts": written(["model", "parameters (10^9)", *named], verdicts()),
        "terms": written(head, terms()),
    }


def with_tables(text: str) -> str:
    """Return the text of the page with its tables replaced."""
    return filled(text, tables(), "plan_table.py")


def filled(text: str, named: Mapping[str, str], script: str) -> str:
    """Return a page with the tables of a script inserted between the markers with their names."""
    for name, table in named.items():
        begin = BEGIN.format(name=name, script=script)
        end = END.format(name=name)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    """Write the tables, or with --check compare them. Return the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    new_text = with_tables(text)
    if "--check" in sys.argv:
        return int(new_text != text)
    PAGE.write_text(new_text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

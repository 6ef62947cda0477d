"""Write the table of docs/parallel.md: parallel axes and traffic of published models on 8 to 128 GPUs.

    python scripts/parallel_table.py            write the table into the page
    python scripts/parallel_table.py --check    exit with 1 if the page is not up to date

The arithmetic is that of `--dry_run` (plugins/plan/memory.py and communication.py). Nothing is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import plan_table  # also makes the project importable

from components.models.size import ModelSize, size_of
from components.train.config import TrainConfig
from plugins.plan.memory import MemoryEstimate, learning

PAGE = plan_table.ROOT / "docs/parallel.md"
MODELS = {name: plan_table.MODELS[name] for name in ("Qwen2.5-7B", "Qwen2.5-32B", "Qwen2.5-72B")}
MODELS["Qwen3-235B-A22B"] = plan_table.MODELS["Qwen3-30B-A3B"] | {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
}
LENGTHS = {"4k": 4096, "32k": 32768, "128k": 131072}
DEVICES = (8, 32, 128)
AXES = ("context", "tensor", "expert")
SEQUENCES = 128
"""Number of sequences per optimizer step."""
MOST = 72 * 10**9
"""Usable bytes of a GPU with 80 GB. A tenth is reserved for fragmentation of the allocator."""
HOST = 2 * 10**12
"""Host memory of a node with 8 GPUs, in bytes."""
SIZES = (1, 2, 4, 8)
"""Sizes of an axis within a node of 8 GPUs."""


def choices(size: ModelSize, devices: int, longest: int) -> Iterator[tuple[TrainConfig, MemoryEstimate]]:
    """Yield each possible configuration and its memory per rank, with optimizer states on the GPU or in host memory."""
    tensors: Sequence[int] = SIZES
    experts: Sequence[int] = (1,)
    if size.experts:  # a mixture of experts is sharded by experts, not by tensors
        tensors = (1,)
        experts = SIZES
    for context, tensor, expert, offload in product(SIZES, tensors, experts, (False, True)):
        # Both axes split the attention heads.
        if size.heads % (context * tensor) or context * tensor > max(SIZES):
            continue
        axes = {"context": context, "tensor": tensor, "expert": expert}
        config = replace(plan_table.TRAIN, adam_offload=offload, **axes)
        yield config, learning(size, config, devices, longest, SEQUENCES, gpu=True)


def fits(need: MemoryEstimate) -> bool:
    """Return True if a GPU and a node have enough memory."""
    return need.total <= MOST and 8 * need.host <= HOST


def choose(size: ModelSize, devices: int, longest: int) -> tuple[TrainConfig, MemoryEstimate]:
    """Return the configuration that fits with the least traffic, or the smallest one if none fits.

    Configurations without offloading come first.
    """
    candidates = list(choices(size, devices, longest))
    fitting = [candidate for candidate in candidates if fits(candidate[1])]
    if not fitting:
        return min(candidates, key=lambda candidate: (candidate[0].adam_offload, candidate[1].total))
    return min(fitting, key=lambda candidate: (candidate[0].adam_offload, sum(candidate[1].sends.values())))


def rows() -> Iterator[Sequence[object]]:
    """Yield a row per model, length and number of GPUs."""
    for (name, shape), (length, longest), devices in product(MODELS.items(), LENGTHS.items(), DEVICES):
        size = size_of(shape)
        assert size is not None
        config, need = choose(size, devices, longest)
        verdict = {True: "yes", False: "no"}[fits(need)]
        if config.adam_offload:
            verdict += " + adam_offload"
        axes = [config.data_ranks(devices), config.context, config.tensor, config.expert]
        sends = [plan_table.gigabytes(need.sends.get(axis, 0)) for axis in ("data", *AXES)]
        yield name, length, devices, *axes, plan_table.gigabytes(need.total), verdict, *sends


def tables() -> dict[str, str]:
    """Return name -> table of the page."""
    head = ["model", "tokens", "GPUs", "data", *AXES, "memory (GB)", "fits", "data sends (GB)"]
    return {"axes": plan_table.written([*head, *(f"{axis} sends" for axis in AXES)], rows())}


def with_tables(text: str) -> str:
    """Return the text of the page with its table replaced."""
    return plan_table.filled(text, tables(), "parallel_table.py")


def main() -> int:
    """Write the table, or with --check compare it. Return the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    new_text = with_tables(text)
    if "--check" in sys.argv:
        return int(new_text != text)
    PAGE.write_text(new_text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

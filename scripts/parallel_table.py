"""The table of docs/parallel.md: which axes published models take on 8 to 128 GPUs, and what ranks then send.

    python scripts/parallel_table.py            write it into the page
    python scripts/parallel_table.py --check    exit 1 if the page has another

The arithmetic is that of `--dry_run` (plugins/plan/memory.py and communication.py). Nothing is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import plan_table  # which makes the project importable

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
"""Of an optimizer step."""
MOST = 72 * 10**9
"""Bytes that may be taken of the 80 GB of a GPU: a tenth is left to what the allocator cannot use."""
HOST = 2 * 10**12
"""Bytes of a machine of 8 GPUs."""
SIZES = (1, 2, 4, 8)
"""Of an axis that stays on a machine of 8 GPUs."""


def choices(size: ModelSize, devices: int, longest: int) -> Iterator[tuple[TrainConfig, MemoryEstimate]]:
    """All axes that are possible, and what a rank then takes; optimizer states on the GPU, and in host memory."""
    tensors, experts = ((1,), SIZES) if size.experts else (SIZES, (1,))
    for context, tensor, expert, offload in product(SIZES, tensors, experts, (False, True)):
        if size.heads % (context * tensor) or context * tensor > max(SIZES):
            continue
        axes = {"context": context, "tensor": tensor, "expert": expert}
        config = replace(plan_table.TRAIN, adam_offload=offload, **axes)
        yield config, learning(size, config, devices, longest, SEQUENCES, gpu=True)


def fits(need: MemoryEstimate) -> bool:
    """Whether a GPU and a machine can hold it."""
    return need.total <= MOST and 8 * need.host <= HOST


def chosen(size: ModelSize, devices: int, longest: int) -> tuple[TrainConfig, MemoryEstimate]:
    """Of those that fit the one that sends least, without offloading if it can; where none fits the smallest."""
    found = list(choices(size, devices, longest))
    fitting = [one for one in found if fits(one[1])]
    if not fitting:
        return min(found, key=lambda one: (one[0].adam_offload, one[1].total))
    return min(fitting, key=lambda one: (one[0].adam_offload, sum(one[1].sends.values())))


def rows() -> Iterator[Sequence[object]]:
    """A row of each model, length and number of GPUs."""
    for (name, shape), (length, longest), devices in product(MODELS.items(), LENGTHS.items(), DEVICES):
        size = size_of(shape)
        assert size is not None
        config, need = chosen(size, devices, longest)
        verdict = "yes" if fits(need) else "no"
        more = " + adam_offload" if config.adam_offload else ""
        axes = [config.data_ranks(devices), config.context, config.tensor, config.expert]
        sends = [plan_table.gigabytes(need.sends.get(axis, 0)) for axis in ("data", *AXES)]
        yield name, length, devices, *axes, plan_table.gigabytes(need.total), verdict + more, *sends


def tables() -> dict[str, str]:
    """The page's table, by name."""
    head = ["model", "tokens", "GPUs", "data", *AXES, "memory (GB)", "fits", "data sends (GB)"]
    return {"axes": plan_table.written([*head, *(f"{axis} sends" for axis in AXES)], rows())}


def with_tables(text: str) -> str:
    """The page with this table in it."""
    return plan_table.filled(text, tables(), "parallel_table.py")


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    found = with_tables(text)
    if "--check" in sys.argv:
        return int(found != text)
    PAGE.write_text(found, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

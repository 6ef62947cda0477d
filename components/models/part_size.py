"""Sizes of parts of a model: the part of a rank under tensor parallelism, and the linear layers."""

from __future__ import annotations

import math
from dataclasses import replace

from components.models.size import ModelSize


def part_of_rank(size: ModelSize, ranks: int) -> ModelSize:
    """Return the sizes of the part of each rank under tensor parallelism, as tensor_parallel.py divides the layers.

    Args:
        size: sizes of the whole model.
        ranks: tensor-parallel degree.
    """
    parts = ranks
    # A vocabulary that the ranks cannot share evenly is whole on each of them.
    if size.vocabulary % ranks:
        parts = 1
    whole = 0
    keys = size.keys // ranks
    key_heads = size.keys * size.heads // max(1, size.queries)
    if key_heads % ranks:
        # The key heads cannot be divided. Each rank computes all of them, and keeps those of its query heads.
        whole = 2 * size.layers * size.hidden * size.keys
        keys = size.keys * math.lcm(key_heads, ranks) // (key_heads * ranks)
    return replace(
        size,
        parameters=(size.parameters - size.rest - whole) // ranks + whole + size.rest // parts,
        head=size.head // parts,
        heads=size.heads // ranks,
        queries=size.queries // ranks,
        keys=keys,
        intermediate=size.intermediate // ranks,
        vocabulary=size.vocabulary // parts,
    )


def linear_sizes(size: ModelSize) -> dict[str, tuple[int, int]]:
    """Return the input and output sizes of each linear layer of a decoder layer.

    Experts are not included, because their weights are three-dimensional tensors and not linear layers.
    """
    wide, narrow = size.queries, size.keys
    attention = {"q_proj": (size.hidden, wide), "k_proj": (size.hidden, narrow), "v_proj": (size.hidden, narrow)}
    attention["o_proj"] = (wide, size.hidden)
    if size.experts:
        return attention
    mlp = dict.fromkeys(("gate_proj", "up_proj"), (size.hidden, size.intermediate))
    return attention | mlp | {"down_proj": (size.intermediate, size.hidden)}

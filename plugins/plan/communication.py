"""Bytes that a rank sends to other ranks in an optimizer step, by axis. Computed like the memory in memory.py.

Collectives are assumed to be rings. When R ranks gather `n` bytes, or reduce and scatter them, each rank sends
n (R - 1) / R bytes, and twice that in an all-reduce. In an all-to-all of `n` bytes, a rank keeps 1 / R and sends the
rest. Messages of a few numbers per token or per step are not counted.
"""

from __future__ import annotations

import math

from components.models.part_size import part_of_rank
from components.models.size import ModelSize
from components.train.config import TrainConfig
from plugins.plan.arithmetic import amount_if, product_width, weight_width


def sent_bytes(
    size: ModelSize, config: TrainConfig, ranks: int, *, trained: int, tokens: int, passes: int
) -> dict[str, int]:
    """Return the number of bytes that one rank sends, by axis. Axes of one rank are omitted.

    Args:
        size: size of the model, whose layers are known.
        config: configuration of the engine.
        ranks: number of ranks that train the model.
        trained: number of parameters that have a gradient.
        tokens: number of tokens of the step that one rank computes.
        passes: number of forward and backward passes of the step, which is the number of its micro-batches.
    """
    if config.tensor > 1:
        # Each rank holds a smaller model, and fewer ranks share it.
        size, ranks = part_of_rank(size, config.tensor), ranks // config.tensor
        trained = size.parameters
    # Recomputing activations repeats the exchange that they need: forward, recomputation and backward.
    exchanges = 2 + int(config.gradient_checkpointing)
    values = tokens * exchanges * product_width(config.precision)
    # A token's state is sent to each of its experts and returned.
    dispatched = 2 * size.experts_per_token * size.hidden
    sent = {
        "data": _gathered(size, config, ranks, passes) + _reduced(size, config, ranks, passes, trained),
        "context": values * size.layers * _share(_attention(size, config.context), config.context),
        # One exchange after attention and one after the MLP, in each direction.
        "tensor": values * size.layers * 2 * _share(2 * size.hidden, config.tensor),
        "expert": values * size.mixtures * _share(dispatched, config.expert),
    }
    return {axis: count for axis, count in sent.items() if count}


def _share(count: int, ranks: int) -> int:
    return count * (ranks - 1) // ranks


def _attention(size: ModelSize, ranks: int) -> int:
    """Return the number of values per token that ranks exchange for attention: queries, keys, values and output.

    Keys and values are repeated until each rank has the same number of them. The output is as wide as the queries.
    """
    heads = size.keys * size.heads // size.queries
    return 2 * size.queries + 2 * size.keys * math.lcm(heads, ranks) // heads


def _gathered(size: ModelSize, config: TrainConfig, ranks: int, passes: int) -> int:
    """Return the bytes of gathered parameters.

    Parameters of layers are gathered for the forward and for the backward pass, the other ones once per pass. Engines
    that keep them for a step gather them once per step, and engines that do not shard them never.
    """
    if config.stage == 0:
        return 0
    width = weight_width(config.precision)
    copies = ranks // config.expert
    layers = size.parameters - size.rest - size.expert_parameters
    in_layers = _share(layers, ranks) + _share(size.expert_parameters // config.expert, copies)
    rest = _share(size.rest, ranks)
    if config.stage < 3:
        return width * (in_layers + rest)
    # fsdp keeps the parameters outside of layers between the forward and the backward pass.
    gathers_of_rest = {"fsdp": 1}.get(config.engine, 2)
    return width * passes * (2 * in_layers + gathers_of_rest * rest)


def _reduced(size: ModelSize, config: TrainConfig, ranks: int, passes: int, trained: int) -> int:
    """Return the bytes of reduced gradients: in each pass, or once per step if a rank keeps them unsharded until
    then.
    """
    shared = amount_if(not config.lora_rank, size.expert_parameters)
    count = _share(trained - shared, ranks) + _share(shared // config.expert, ranks // config.expert)
    if config.engine == "fsdp":
        # fsdp reduces gradients in float32.
        return 4 * count * {3: passes}.get(config.stage, 1)
    return weight_width(config.precision) * count * {0: 2, 1: 1}.get(config.stage, passes)

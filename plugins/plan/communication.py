"""How many bytes a rank sends to others in an optimizer step, by axis: arithmetic, like that of memory.py.

Collectives are taken to be rings. Of `n` bytes that R ranks gather, or reduce and scatter, each of them sends
n (R - 1) / R, and in an all-reduce twice that. In an all-to-all of `n` bytes of its own a rank keeps 1 / R and sends
the rest. What is a few numbers for each token or step is left out.
"""

from __future__ import annotations

import math

from components.models.size import ModelSize
from components.train.config import TrainConfig


def sent_bytes(
    size: ModelSize, config: TrainConfig, ranks: int, *, trained: int, tokens: int, passes: int
) -> dict[str, int]:
    """What one rank sends, by axis; axes of one rank are not there.

    Args:
        size: of the model, whose layers are known.
        config: of the engine.
        ranks: that train it.
        trained: parameters that have a gradient.
        tokens: of the step that one rank computes.
        passes: forward and backward passes of the step, which are its micro-batches.
    """
    if config.tensor > 1:
        # A rank has a model of its own, smaller and over fewer ranks.
        size, ranks = size.cut(config.tensor), ranks // config.tensor
        trained = size.parameters
    # Where activations are recomputed, what ranks exchanged for them is exchanged again.
    values = tokens * (3 if config.gradient_checkpointing else 2) * (4 if config.precision == "fp32" else 2)
    # A state goes to each of its experts, and comes back from there.
    dispatched = 2 * size.experts_per_token * size.hidden
    found = {
        "data": _gathered(size, config, ranks, passes) + _reduced(size, config, ranks, passes, trained),
        "context": values * size.layers * _share(_attention(size, config.context), config.context),
        # After attention and after the MLP, and as often on the way back.
        "tensor": values * size.layers * 2 * _share(2 * size.hidden, config.tensor),
        "expert": values * size.mixtures * _share(dispatched, config.expert),
    }
    return {axis: count for axis, count in found.items() if count}


def _share(count: int, ranks: int) -> int:
    return count * (ranks - 1) // ranks


def _attention(size: ModelSize, ranks: int) -> int:
    """Numbers of a token that ranks exchange for attention: queries, keys and values, which are repeated until each
    rank has as many, and the output, which is as wide as the queries.
    """
    heads = size.keys * size.heads // size.queries
    return 2 * size.queries + 2 * size.keys * math.lcm(heads, ranks) // heads


def _gathered(size: ModelSize, config: TrainConfig, ranks: int, passes: int) -> int:
    """Parameters: of layers for the forward and for the backward pass, of the rest for both. Where a step keeps them
    they are gathered once, and where they are whole not at all.
    """
    if config.stage == 0:
        return 0
    width = 2 if config.precision == "bf16" else 4
    experts, copies = size.expert_parameters // config.expert, ranks // config.expert
    layers = size.parameters - size.rest - size.expert_parameters
    in_layers, rest = _share(layers, ranks) + _share(experts, copies), _share(size.rest, ranks)
    if config.stage < 3:
        return width * (in_layers + rest)
    return width * passes * (2 * in_layers + (1 if config.engine == "fsdp" else 2) * rest)


def _reduced(size: ModelSize, config: TrainConfig, ranks: int, passes: int, trained: int) -> int:
    """Gradients: of each pass, or of the step where a rank has them whole until its end."""
    shared = 0 if config.lora_rank else size.expert_parameters
    count = _share(trained - shared, ranks) + _share(shared // config.expert, ranks // config.expert)
    if config.engine == "fsdp":
        return 4 * count * (passes if config.stage == 3 else 1)
    width = 2 if config.precision == "bf16" else 4
    return width * count * {0: 2, 1: 1}.get(config.stage, passes)

"""Checks of parallel degrees before a model is loaded. Imports without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from components.models.size import ModelSize
from components.train.config import AXES, TrainConfig, TrainOptions


def check_options(train: TrainOptions, *, context: int, tensor: int, expert: int) -> Iterator[str]:
    """Yield a message for each option of training that excludes one of these degrees.

    Args:
        train: options of the training.
        context: context-parallel degree.
        tensor: tensor-parallel degree.
        expert: expert-parallel degree.
    """
    for axis, size in zip(AXES, (context, tensor, expert), strict=True):
        if size > 1 and train.engine != "fsdp":
            yield (
                f"parallel.{axis}={size} needs engine=fsdp, and engine={train.engine} has one axis of ranks: its ZeRO "
                "partitions over all that it averages over; set train.engine=fsdp, with train.zero_stage 2 or 3"
            )
    if context > 1 and train.packing is False:
        yield (
            f"parallel.context={context} cuts packed rows, and packing=False pads sequences; leave train.packing out"
        )
    if tensor > 1 and train.lora_rank:
        yield (
            f"parallel.tensor={tensor} cuts the matrices that adapters stand in front of, and lora_rank="
            f"{train.lora_rank} trains adapters; set one of them to its default"
        )
    if expert > 1 and train.lora_rank:
        yield (
            f"parallel.expert={expert} shares out experts that are trained, and lora_rank={train.lora_rank} trains "
            "adapters, and experts can have none; set one of them to its default"
        )
    if tensor > 1 and expert > 1:
        yield (
            f"parallel.tensor={tensor} cuts every matrix, those of experts too, which parallel.expert={expert} leaves "
            "whole; set one of them to 1"
        )


def check_model(size: ModelSize, config: TrainConfig) -> None:
    """Check that the axes of a training engine divide a model.

    Raises:
        ValueError: the number of attention heads or experts is not divisible. The message says what to set.
    """
    # Both axes split the attention heads, so their product must divide the number of heads.
    axes = {"context": config.context, "tensor": config.tensor}
    set_axes = " x ".join(f"parallel.{axis}={number}" for axis, number in axes.items() if number > 1)
    if size.heads % (config.context * config.tensor):
        raise ValueError(f"{set_axes} does not divide the model's {size.heads} attention heads; set a divisor")
    if config.expert > 1 and size.layers and not size.experts:
        raise ValueError(f"parallel.expert={config.expert}: the model's layers have no experts; set 1")
    if size.experts % config.expert:
        raise ValueError(
            f"parallel.expert={config.expert} does not divide the {size.experts} experts of the model's layers; set a "
            "divisor"
        )


def data_ranks(config: TrainConfig, ranks: int) -> int:
    """Return the data-parallel degree of a number of ranks; see `TrainConfig.data_ranks`.

    Raises:
        ValueError: the parallel degrees do not divide the number of ranks.
    """
    axes = {"context": config.context, "tensor": config.tensor}
    group_size = math.prod(axes.values())
    if ranks % group_size:
        degrees = " x ".join(f"parallel.{axis}={size}" for axis, size in axes.items() if size > 1)
        raise ValueError(
            f"{degrees} does not divide {ranks} ranks; set a divisor, or another number of ranks (placement)"
        )
    # Experts are distributed over a separate axis of the same ranks, so their degree is not a factor of `group_size`.
    if ranks % config.expert:
        raise ValueError(
            f"parallel.expert={config.expert} does not divide {ranks} ranks; set a divisor, or another number of "
            "ranks (placement)"
        )
    return ranks // group_size

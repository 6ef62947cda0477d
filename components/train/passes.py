"""Passes without gradients, over ranks that may have to make them together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.batch import Batch
from components.models.causal import evaluate
from components.models.packing.packed_model import packs
from components.train.config import PassLimits
from plugins.prefix_sharing.shared_prompts import runs_of, saved_by, shared_micro_batches, shares_prompts

M = TypeVar("M", bound=nn.Module)


def evaluate_together(
    model: M,
    batch: Batch,
    limits: PassLimits,
    device: torch.device,
    compute: Callable[[M, Batch], Tensor],
    is_collective: bool,
) -> Tensor:
    """Apply `compute` to a batch in micro-batches, without gradients.

    Args:
        model: whose passes they are.
        batch: this rank's; ranks may have different numbers of sequences.
        limits: of a micro-batch.
        device: where `compute` wants its micro-batch.
        compute: (model, micro-batch of n tokens) -> [n].
        is_collective: a pass gathers parameters, so that every rank has to make as many as the busiest one.

    Returns:
        [N] on the CPU, in the order of `batch`.

    Raises:
        ValueError: passes are collective, and this rank has nothing to make them with.
    """
    plan = micro_batches(batch, limits, model)
    most = torch.tensor(len(plan), device=device)
    if is_collective:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    extra = int(most) - len(plan)
    if extra and not len(batch):
        raise ValueError(
            f"rank {dist.get_rank()} has no sequence to evaluate, and the model is partitioned over the ranks, which "
            "compute together; send at least one sequence to every rank"
        )
    result_N = evaluate(batch, plan, device, partial(compute, model))
    with torch.no_grad():
        for _ in range(extra):
            compute(model, batch.select(batch.lengths.argmin().view(1)).to(device))
    return result_N


def micro_batches(batch: Batch, limits: PassLimits, model: nn.Module) -> list[Tensor]:
    """Positions for the micro-batches of a pass of `model`, together every sequence once."""
    if shares_prompts(model):
        runs = runs_of(batch)
        if saved_by(runs):
            return shared_micro_batches(batch.lengths, runs, limits.max_tokens, limits.max_sequences)
    return batch.micro_batch_indices(limits.max_tokens, limits.max_sequences, packs(model))

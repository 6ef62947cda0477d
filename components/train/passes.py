"""Forward passes without gradients, which the ranks of a sharded model must make together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.batch import Batch
from components.models.packing.layout import layout_of
from components.process.heartbeat import beat
from components.registry import find
from components.train.config import PassLimits

M = TypeVar("M", bound=nn.Module)


def evaluate_together(
    model: M,
    batch: Batch,
    limits: PassLimits,
    device: torch.device,
    compute: Callable[[M, Batch], Tensor],
    is_collective: bool,
) -> Tensor:
    """Apply `compute` to the batch of each rank in micro-batches, without gradients.

    Args:
        model: model that is evaluated.
        batch: sequences of this rank. Ranks may have different numbers of sequences.
        limits: limits of a micro-batch.
        device: device of the micro-batches that `compute` receives.
        compute: function (model, micro-batch of n tokens) -> [n, ...].
        is_collective: passes gather parameters, so all ranks must make the same number of passes.

    Returns:
        [N, ...] on the CPU, in the order of `batch`.

    Raises:
        ValueError: passes are collective, and this rank has no sequence for the passes that other ranks make.
    """
    plan = layout_of(model).micro_batches(batch, limits.max_tokens, limits.max_sequences)
    most = torch.tensor(len(plan), device=device)
    # A rank that makes fewer passes than another would leave it waiting in the gathering of parameters.
    if is_collective:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    extra = int(most) - len(plan)
    if extra and not len(batch):
        raise ValueError(
            f"rank {dist.get_rank()} has no sequence to evaluate, and the model is partitioned over the ranks, which "
            "compute together; send at least one sequence to every rank"
        )
    result_N = evaluate(batch, plan, device, partial(compute, model))
    # The shortest sequence makes the missing passes cheap; their results are discarded.
    with torch.no_grad():
        for _ in range(extra):
            compute(model, batch.select(batch.lengths.argmin().view(1)).to(device))
    return result_N


def on_device(batches: Iterable[Batch], device: torch.device | str) -> Iterator[Batch]:
    """Yield the batches on a device. With a plug-in for the device, each is copied while the one before is computed."""
    feed = find("micro-batch feed", torch.device(device).type)
    yield from (batch.to(device) for batch in batches) if feed is None else feed(batches, device)


def evaluate(
    batch: Batch, plan: list[Tensor], device: torch.device | str, compute: Callable[[Batch], Tensor]
) -> Tensor:
    """Apply `compute` to a batch in micro-batches, without gradients.

    Args:
        batch: B sequences.
        plan: positions of the sequences of each micro-batch. Every sequence occurs once.
        device: device of the micro-batches that `compute` receives.
        compute: function (micro-batch of n tokens) -> [n, ...].

    Returns:
        [N, ...] on the CPU, in the order of `batch`.
    """
    if not plan:
        return torch.zeros(0)
    parts = list[Tensor]()
    with torch.no_grad():
        for micro in on_device(map(batch.select, plan), device):
            # Copied to the host at once. Otherwise the results of all micro-batches would take device memory.
            parts.append(compute(micro).cpu())
            beat()
    # The plan sorts sequences into micro-batches; the results are returned to the order of the batch.
    order_B = torch.cat(plan)
    shuffled = Batch(batch.lengths[order_B], {"row": torch.arange(batch.num_tokens)})
    return torch.cat(parts)[shuffled.select(order_B.argsort())["row"]]

"""Base class of training engines: optimizer steps and forward passes of one model over all ranks."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.batch import Batch
from components.batch.ragged import sent
from components.models.device import compute_device, peak_gpu_memory
from components.models.packing.layout import layout_of, members_of
from components.models.precision import compute_in
from components.models.routers import find_routers
from components.process.heartbeat import beat
from components.registry import find, load
from components.rl.aggregation import LossOutput, Totals
from components.rl.masked import sequence_sums
from components.train.adapters import open_adapters
from components.train.config import TrainConfig
from components.train.mesh import open_axes
from components.train.partitioned_model import PartitionedModel
from components.train.passes import evaluate_together, on_device
from components.train.process_group import init_process_group

LossFunction = Callable[[nn.Module, Batch, Totals], LossOutput]


class AuxiliaryLoss(Protocol):
    """Auxiliary loss that a plug-in adds to the loss function of every optimizer step."""

    def added_to(
        self, loss_fn: LossFunction, minibatch: Batch, plans: list[list[Tensor]], engine: TrainEngine
    ) -> LossFunction:
        """Return a loss function for the micro-batches of a step that includes the auxiliary loss.

        Args:
            loss_fn: loss function of the step.
            minibatch: global minibatch, the same on all ranks.
            plans: positions of the sequences of each micro-batch, by data-parallel rank.
            engine: the engine that takes the step. Its model is in training mode.
        """
        ...


class TrainEngine(PartitionedModel):
    """Training engine of one model with one optimizer. All ranks must make the same calls in the same order."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        """Join the process group, set the seed and prepare `model`. Subclasses then shard it with their library.

        Args:
            model: model to train. If the configuration says so, adapters are inserted and autocast is enabled, in
                place.
            config: configuration of the engine.
        """
        init_process_group()
        self.config = config
        self.model = model
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = compute_device()
        self.axes = open_axes(config, self.device)
        # Ranks that share a layer must use the same dropout mask, or their parts would belong to different functions.
        torch.manual_seed(config.seed + self.rank // config.tensor)
        self.adapters = open_adapters(model, config)
        if config.kernels != "plain":
            load("training kernels", "model", "train.kernels")(model, config.kernels, self.device)
        kind = find("auxiliary loss", "router") if config.router_aux_loss_coef or find_routers(model).modules else None
        self._auxiliary_loss: AuxiliaryLoss | None = kind and kind(model, config.router_aux_loss_coef)
        compute_in(model, config.precision, self.device)

    @property
    @abstractmethod
    def _passes_are_collective(self) -> bool:
        """True if a forward pass gathers parameters, so that every rank must take part in it."""

    @property
    def _trained(self) -> nn.Module:
        """Module that is passed to the loss function."""
        return self.model

    @abstractmethod
    def _begin_pass(self, is_last: bool) -> None:
        """Prepare one forward and backward pass.

        Args:
            is_last: it is the last pass of its optimizer step.
        """

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Compute the gradient of `loss`, average it over the ranks and add it to the accumulated gradient."""

    @abstractmethod
    def _step(self, learning_rate: float) -> float:
        """Take an optimizer step and return the 2-norm of the gradient before clipping.

        Raises:
            FloatingPointError: the norm is not finite. The weights have not been changed then.
        """

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        return self.config.learning_rate_at(self.step_count)

    def forward(self, batch: Batch, compute: Callable[[nn.Module, Batch], Tensor], *, adapters: bool = True) -> Tensor:
        """Evaluate `batch` without gradients, in micro-batches.

        Args:
            batch: sequences of this rank. Ranks may have different numbers of sequences.
            compute: function (model, micro-batch of n tokens) -> [n].
            adapters: False disables the adapters, which gives the model before training.

        Returns:
            [N] on the CPU, in the order of `batch`.

        Raises:
            ValueError: `adapters` is False, and the model has none.
        """
        self.check_awake()
        if not adapters:
            if self.adapters is None:
                raise ValueError("the model has no adapters, and its weights are trained; set lora_rank")
            with self.adapters.disabled():
                return self.forward(batch, compute)
        model, limits = self.model.eval(), self.config.forward_limits
        gathered, part = self.axes.gather_batch(batch)
        return evaluate_together(model, gathered, limits, self.device, compute, self._passes_are_collective)[part]

    def train_step(self, minibatch: Batch, loss_fn: LossFunction, group_size: int = 1) -> dict[str, float]:
        """Take one optimizer step on `minibatch`.

        Args:
            minibatch: global minibatch, the same on all ranks. Each rank trains on its share of the sequences.
            loss_fn: function (model, micro-batch, totals) -> LossOutput. Loss and metrics are sums over the
                micro-batch divided by the totals, so that they add up to the mean over the minibatch.
            group_size: number of consecutive sequences that the loss compares and that must be in one micro-batch, such
                as 2 for preference pairs.

        Returns:
            Metrics, the same on all ranks: "loss" and the metrics of `loss_fn`, summed over micro-batches and ranks;
            "grad_norm" before clipping; "learning_rate" of this step; on GPUs also those of `peak_gpu_memory` (the
            maximum over the ranks) and of the plug-in `utilisation`.

        Raises:
            ValueError: `minibatch` is empty, trains on no token or contains part of a group.
            FloatingPointError: the loss or the gradient is not finite. It is raised on all ranks before the weights
                change. The engine cannot be used afterwards.
        """
        self.check_awake()
        began = time.perf_counter()
        totals = totals_of(minibatch)
        limits = self.config.max_tokens, self.config.max_sequences
        layout = layout_of(self.model)
        plans = layout.micro_batches_by_rank(minibatch, self.axes.data, *limits, group_size)
        plan = plans[self.axes.data_rank]
        # All ranks make the same number of backward passes, because each one reduces gradients. A rank with fewer
        # micro-batches would leave the others waiting.
        passes = max(map(len, plans))
        self.model.train()
        if self._auxiliary_loss is not None:
            loss_fn = self._auxiliary_loss.added_to(loss_fn, minibatch, plans, self)
        sums: dict[str, Tensor] = {}
        indices = plan + [shortest_group(minibatch, group_size)] * (passes - len(plan))
        for i, micro in enumerate(on_device(map(minibatch.select, indices), self.device)):
            # A pass that is made only for the other ranks must change neither the gradient nor the metrics.
            counts = 1.0 if i < len(plan) else 0.0
            self._begin_pass(is_last=i == passes - 1)
            output = loss_fn(self._trained, micro, totals)
            # The loss is already divided by the total of all ranks, so the averaging over ranks is undone here.
            self._backward(output.loss * (self.axes.shards.size() * counts))
            beat()
            for name, value in {"loss": output.loss, **output.metrics}.items():
                summand = value.detach().double() * counts
                sums[name] = sums[name] + summand if name in sums else summand
        metrics = self._reduced(sums)
        # Before the step, because NaN would spread to all weights and to the moments of the optimizer.
        self._check_finite(metrics)
        # Read before the step is counted, because the schedule depends on the count.
        metrics |= {"grad_norm": self._step(self.learning_rate), "learning_rate": self.learning_rate}
        self.step_count += 1
        if self.average is not None:
            self.average.follow(self)
        is_measured = self.device.type == "cuda" and self.config.log_utilisation
        utilisation = find("utilisation", "gpu") if is_measured else None
        if utilisation is not None:
            computed = layout.computed_tokens(minibatch, plans)
            seconds = time.perf_counter() - began
            metrics |= utilisation(self.model, minibatch.lengths, computed, seconds, self.world_size)
        return metrics

    def _check_gradient(self, norm: float) -> None:
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the loss of optimizer step {self.step_count} is finite, but its gradient is not: grad_norm={norm}; "
                "the weights were left as they are. Look for extreme values in the batch, or lower the learning rate"
            )

    def _reduced(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Return the sums over the ranks, and on GPUs the peak memory of any rank, in one transfer from the device."""
        names = sorted(sums)
        values = torch.stack([sums[name].to(self.device) for name in names])
        self.axes.summed(values)
        peaks = peak_gpu_memory()
        if peaks:
            peak = sent(torch.tensor([*peaks.values()], dtype=values.dtype), self.device)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            values = torch.cat([values, peak])
        return dict(zip([*names, *peaks], self._read(values), strict=True))

    def _read(self, values: Tensor) -> list[float]:
        """Return the numbers of a tensor on the device. Engines read the norm of the gradient in the same transfer."""
        return values.tolist()

    def _check_finite(self, metrics: dict[str, float]) -> None:
        if math.isfinite(metrics["loss"]):
            return
        odd = ", ".join(f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value))
        raise FloatingPointError(
            f"the loss of optimizer step {self.step_count} is not finite: {odd}; the weights were left as they are. "
            "Look at the rewards, advantages and log-probabilities of the batch for inf and nan, or lower the learning "
            "rate"
        )


def totals_of(minibatch: Batch) -> Totals:
    """Return the numbers of tokens and sequences of a minibatch that are trained on.

    The tokens are given by the column `action_mask`, else by `loss_mask`. Without either, all tokens count.

    Raises:
        ValueError: the minibatch is empty, or its mask is False everywhere.
    """
    if not len(minibatch):
        raise ValueError("the minibatch is empty; give train_step at least one sequence")
    mask = next((name for name in ("action_mask", "loss_mask") if name in minibatch), None)
    # float64 counts exactly, where float32 would round sums above 2^24.
    tokens_B = sequence_sums(minibatch[mask].double(), minibatch.lengths) if mask else minibatch.lengths
    tokens = int(tokens_B.sum())
    if tokens == 0:
        raise ValueError(
            f"{mask} is False for all {minibatch.num_tokens} tokens of the minibatch, so nothing can be "
            "learned; leave such minibatches out"
        )
    return Totals(tokens=tokens, sequences=int((tokens_B > 0).sum()), rows=len(minibatch))


def shortest_group(batch: Batch, group_size: int = 1) -> Tensor:
    """Return the positions of the shortest group, for a pass that a rank makes only because other ranks make one."""
    return members_of(batch.lengths.view(-1, group_size).sum(1).argmin(), group_size)

"""Load-balancing loss of a mixture of experts, which spreads tokens evenly over the experts.

Fedus et al. 2021 ("Switch Transformers"), eq. 4 to 6, over all layers jointly, as in transformers. The shares of the
assignments are those of the whole optimizer step (Qiu et al. 2025, arXiv 2501.11873), so that the loss does not depend
on micro-batches and ranks. transformers takes those of each forward pass.

Legend: `B` sequences, `R` routed states of a layer, `L` routed layers, `E` experts, `K` experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.batch import Batch
from components.models.packing.layout import packs
from components.models.packing.row_slices import row_slices
from components.models.routers import find_routers
from components.rl.aggregation import LossOutput, Totals
from components.train.engine import totals_of
from plugins.parallel.context import ContextSlices

if TYPE_CHECKING:
    from components.train.engine import LossFunction, TrainEngine


class RoutedSums(NamedTuple):
    """Sums over the routed states of a micro-batch. Those of several micro-batches or ranks add up."""

    assigned_LE: Tensor
    """[L, E] float32, number of assignments to each expert."""
    probability_E: Tensor
    """[E] float32, router probabilities of all layers. Gradients flow through it alone."""
    logsumexp: Tensor
    """[] float32, log-sum-exp of the router logits of all layers."""
    rows: Tensor
    """[] float32, number of states of a layer."""

    def reduced(self, group: dist.ProcessGroup | None) -> RoutedSums:
        """Return the sums over the ranks of a group, without gradients."""
        sums = [tensor.detach().clone() for tensor in self]
        for tensor in sums:
            dist.all_reduce(tensor, group=group)
        return RoutedSums(*sums)


class RouterLoss:
    """Load-balancing loss of a model. Dense models have none."""

    def __init__(self, model: nn.Module, coefficient: float = 1.0) -> None:
        """
        Args:
            model: policy or value model.
            coefficient: weight of the loss. 0 adds only the routers' metrics.

        Raises:
            ValueError: the model's configuration does not have the number of experts per token.
        """
        self._routers = find_routers(model)
        self._coefficient = coefficient
        config: Any = getattr(model, "config", None) or getattr(getattr(model, "backbone", None), "config", None)
        self._top_k = 0
        if self._routers.modules:
            # With a coefficient of 0, a model whose configuration lacks this name trains without router metrics.
            self._top_k = getattr(config.get_text_config(), "num_experts_per_tok", 0)
        if coefficient and self._routers.modules and not self._top_k:
            raise ValueError("router_aux_loss_coef: the model's config.json has no num_experts_per_tok; set it to 0")

    def added_to(
        self, loss_fn: LossFunction, minibatch: Batch, plans: list[list[Tensor]], engine: TrainEngine
    ) -> LossFunction:
        """See `AuxiliaryLoss.added_to`. For a dense model `loss_fn` is returned unchanged."""
        if not self._top_k:
            return loss_fn
        step: RoutedSums | None = None
        if self._coefficient and sum(map(len, plans)) > 1:
            step = self._sums_of_step(loss_fn, minibatch, plans, engine)

        def both(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
            output, local = self._observed(loss_fn, model, micro, totals)
            together = self._together(model, local)
            share = row_share(micro, minibatch)
            metrics = {name: x * share for name, x in router_metrics(together, self._top_k).items()}
            if not self._coefficient:
                return LossOutput(output.loss, output.metrics | metrics)
            balance = load_balancing_loss(local, together if step is None else step)
            # The ranks that share a row report the same loss, and each of them trains on its slice.
            value = balance.detach() if together is local else load_balancing_loss(together, step or together)
            metrics["router_aux_loss"] = value
            # In this order the ranks get equal bits.
            balance = value + (balance - balance.detach())
            return LossOutput(output.loss + self._coefficient * balance, output.metrics | metrics)

        return both

    def _sums_of_step(
        self, loss_fn: LossFunction, minibatch: Batch, plans: list[list[Tensor]], engine: TrainEngine
    ) -> RoutedSums:
        """Return the sums over all micro-batches of all ranks, from a forward pass of each without gradients."""
        plan = plans[engine.axes.data_rank]
        # All ranks make the same number of passes, because a pass may gather parameters.
        shortest = min((index for each in plans for index in each), key=len)
        totals = totals_of(minibatch)
        sums: list[RoutedSums] = []
        with torch.no_grad():
            for i in range(max(map(len, plans))):
                micro = minibatch.select(plan[i] if i < len(plan) else shortest).to(engine.device)
                _, local = self._observed(loss_fn, engine.model, micro, totals)
                weight = 1.0 if i < len(plan) else 0.0
                sums.append(RoutedSums(*(weight * tensor for tensor in local)))
        added = RoutedSums(*(torch.stack(tensors).sum(0) for tensors in zip(*sums, strict=True)))
        return added.reduced(engine.axes.shards.get_group())

    def _observed(
        self, loss_fn: LossFunction, model: nn.Module, micro: Batch, totals: Totals
    ) -> tuple[LossOutput, RoutedSums]:
        """Compute a loss. Return it and the sums of this rank's states."""
        with self.watched() as logits:
            output = loss_fn(model, micro, totals)
        return output, routed_sums(logits, self._counted(logits, micro, model), self._top_k)

    def _together(self, model: nn.Module, local: RoutedSums) -> RoutedSums:
        """Return the sums over the ranks that share the rows of a model."""
        slices = row_slices(model)
        return local.reduced(slices.group) if isinstance(slices, ContextSlices) else local

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """Inside, forward passes append the router logits [R, E] of each layer to the yielded list."""
        seen: list[Tensor] = []

        def note(_: nn.Module, __: Any, output: Any) -> None:
            logits = output[self._routers.index] if isinstance(output, tuple) else output
            seen.append(logits.flatten(0, -2))

        # The hooks are removed after the forward pass. Otherwise activation checkpointing, which runs the forward pass
        # again, would append the logits twice.
        handles = [router.register_forward_hook(note) for router in self._routers.modules]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def _counted(self, logits: Sequence[Tensor], micro: Batch, model: nn.Module) -> Tensor:
        """[R] float32: 1 for states that count, 0 for padding."""
        rows, device = logits[0].shape[0], logits[0].device
        slices = row_slices(model)
        if isinstance(slices, ContextSlices):
            return slices.is_filled(device).float()
        if packs(model):
            return torch.ones(rows, device=device)
        width = rows // len(micro)
        column_T = torch.arange(width, device=device)
        # A policy does not read the last token of the longest sequence. The last token of a shorter sequence lies
        # inside the padded rectangle. It is not counted either, because otherwise packing would change the loss.
        unread = int(micro.lengths.max()) - width
        read_B = (micro.lengths.to(device) - unread).clamp(min=0)
        return (column_T < read_B.unsqueeze(1)).flatten().float()


def row_share(micro: Batch, minibatch: Batch) -> float:
    """Return a micro-batch's share of the routed rows of an optimizer step.

    All sequences count, also those without a trained token: they are routed like the others. A sequence counts with
    all tokens but its last, from which nothing is predicted. transformers weights sequences of a batch the same way.
    """
    rows = minibatch.num_tokens - len(minibatch)
    return (micro.num_tokens - len(micro)) / max(1, rows)


def routed_sums(logits: Sequence[Tensor], counted_R: Tensor, top_k: int) -> RoutedSums:
    """Return the sums of a forward pass.

    Args:
        logits: router logits [R, E] of each layer.
        counted_R: 1 for states that count, 0 for padding.
        top_k: number of experts per token.
    """
    assigned_LE = counted_R.new_zeros(len(logits), logits[0].shape[-1])
    probability_E = torch.zeros_like(assigned_LE[0])
    logsumexp = counted_R.new_zeros(())
    for layer, logits_RE in enumerate(logits):
        # Probabilities keep the router's dtype and so its rounding. Sums are float32.
        probability_RE = logits_RE.softmax(-1)
        chosen_RK = probability_RE.topk(top_k, dim=-1).indices
        assigned_LE[layer].index_add_(0, chosen_RK.flatten(), counted_R.repeat_interleave(top_k))
        probability_E = probability_E + (probability_RE.float() * counted_R.unsqueeze(-1)).sum(0)
        logsumexp += (logits_RE.detach().float().logsumexp(-1) * counted_R).sum()
    return RoutedSums(assigned_LE, probability_E, logsumexp, counted_R.sum())


@torch.no_grad()
def router_metrics(sums: RoutedSums, top_k: int) -> dict[str, Tensor]:
    """Return metrics of the routers of a micro-batch, each the mean over the layers unless noted otherwise.

    Those that are not linear in the loads (maximum, minimum and imbalance) depend on how a batch is cut into
    micro-batches.

    Args:
        sums: sums of the micro-batch.
        top_k: number of experts per token.

    Returns:
        router_load_max: assignments of the most used expert relative to an equal share, from 1 to E / K.
        router_load_min: assignments of the least used expert relative to an equal share, from 1 to 0.
        router_imbalance: 0 if all experts have equal shares, 1 if all tokens are routed to the same K.
        router_imbalance_max: the largest of a layer.
        router_logsumexp: mean log-sum-exp of a token's logits.
        expert_load_<e>: assignments of expert e relative to an equal share.
    """
    layers, experts = sums.assigned_LE.shape
    rows = sums.rows.clamp(min=1)
    load_LE = sums.assigned_LE * experts / (rows * top_k)
    load_E, most_L = load_LE.mean(0), load_LE.amax(-1)
    imbalance_L = (most_L - 1) / max(experts / top_k - 1, 1e-6)
    return {
        "router_load_max": most_L.mean(),
        "router_load_min": load_LE.amin(-1).mean(),
        "router_imbalance": imbalance_L.mean(),
        "router_imbalance_max": imbalance_L.max(),
        "router_logsumexp": sums.logsumexp / (rows * layers),
        **{f"expert_load_{expert}": load for expert, load in enumerate(load_E)},
    }


def load_balancing_loss(sums: RoutedSums, step: RoutedSums) -> Tensor:
    """Return E times the sum over the experts of (share of assignments) x (mean probability), [] float32.

    It is K if all experts have equal shares, and up to E if the same K have all tokens.

    Args:
        sums: sums of a micro-batch or of a rank's slice of it.
        step: sums of the whole optimizer step. The losses of all micro-batches add up to that of the step.
    """
    layers, experts = step.assigned_LE.shape
    # Sequences of one token have no counted row; the loss is 0 then.
    rows = (step.rows * layers).clamp(min=1)
    return experts * (step.assigned_LE.sum(0) / rows * sums.probability_E / rows).sum()

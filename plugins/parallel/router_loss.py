"""Load-balancing loss of a mixture of experts, which spreads tokens evenly over the experts.

Fedus et al. 2021 ("Switch Transformers"), eq. 4 to 6, over all layers jointly, as in transformers.

Legend: `B` sequences, `R` routed states of a layer, `E` experts, `K` experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.models.packing.layout import packs
from components.models.routers import find_routers
from components.rl.aggregation import LossOutput, Totals

if TYPE_CHECKING:
    from components.train.engine import LossFunction


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

    def added_to(self, loss_fn: LossFunction, minibatch: Batch) -> LossFunction:
        """Return `loss_fn` plus this loss, for one optimizer step. A micro-batch is weighted by its share of the rows
        that the step routes. For a dense model return `loss_fn` unchanged.
        """

        def both(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
            with self.watched() as logits:
                output = loss_fn(model, micro, totals)
            counted_R = self._counted(logits, micro, packs(model))
            share = row_share(micro, minibatch)
            metrics = {name: x * share for name, x in router_metrics(logits, counted_R, self._top_k).items()}
            if not self._coefficient:
                return LossOutput(output.loss, output.metrics | metrics)
            balance = load_balancing_loss(logits, counted_R, self._top_k) * share
            metrics["router_aux_loss"] = balance.detach()
            return LossOutput(output.loss + self._coefficient * balance, output.metrics | metrics)

        if self._top_k:
            return both
        return loss_fn

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

    def loss(self, logits: Sequence[Tensor], micro: Batch, packed: bool) -> Tensor:
        """Return the loss, [] float32: K if all experts have equal shares, up to E if the same K have all tokens.

        Args:
            logits: router logits [R, E] of each layer.
            micro: the sequences of the forward pass.
            packed: sequences are concatenated. Otherwise they are padded, and padding is not counted.
        """
        return load_balancing_loss(logits, self._counted(logits, micro, packed), self._top_k)

    def _counted(self, logits: Sequence[Tensor], micro: Batch, packed: bool) -> Tensor:
        """[R] float32: 1 for states that count, 0 for padding. See `loss`."""
        rows = logits[0].shape[0]
        counted_R = torch.ones(rows, device=logits[0].device)
        if not packed:
            width = rows // len(micro)
            column_T = torch.arange(width, device=logits[0].device)
            # A policy does not read the last token of the longest sequence. That of a shorter one lies inside the
            # padded rectangle; it is not counted either, or packing would change the loss.
            unread = int(micro.lengths.max()) - width
            read_B = (micro.lengths.to(column_T.device) - unread).clamp(min=0)
            counted_R = (column_T < read_B.unsqueeze(1)).flatten().float()
        return counted_R


def row_share(micro: Batch, minibatch: Batch) -> float:
    """Return a micro-batch's share of the routed rows of an optimizer step.

    All sequences count, also those without a trained token: they are routed like the others. A sequence counts with
    all tokens but its last, from which nothing is predicted. transformers weights sequences of a batch the same way.
    """
    rows = minibatch.num_tokens - len(minibatch)
    return (micro.num_tokens - len(micro)) / max(1, rows)


@torch.no_grad()
def router_metrics(logits: Sequence[Tensor], counted_R: Tensor, top_k: int) -> dict[str, Tensor]:
    """Return metrics of the routers of a micro-batch, each the mean over the layers.

    They depend on how a batch is cut into micro-batches.

    Args:
        logits: router logits [R, E] of each layer.
        counted_R: 1 for states that count, 0 for padding.
        top_k: number of experts per token.

    Returns:
        router_load_max: assignments of the most used expert relative to an equal share, from 1 to E / K.
        router_load_min: assignments of the least used expert relative to an equal share, from 1 to 0.
        router_imbalance: 0 if all experts have equal shares, 1 if all tokens are routed to the same K.
        router_logsumexp: mean log-sum-exp of a token's logits.
    """
    experts = logits[0].shape[-1]
    rows = counted_R.sum().clamp(min=1)
    sums = counted_R.new_zeros(4)
    for logits_RE in logits:
        chosen_RK = logits_RE.topk(top_k, dim=-1).indices
        assigned_E = counted_R.new_zeros(experts)
        assigned_E.index_add_(0, chosen_RK.flatten(), counted_R.repeat_interleave(top_k))
        load_E = assigned_E * experts / (rows * top_k)
        logsumexp_R = logits_RE.float().logsumexp(-1)
        imbalance = (load_E.max() - 1) / max(experts / top_k - 1, 1e-6)
        sums += torch.stack([load_E.max(), load_E.min(), imbalance, (logsumexp_R * counted_R).sum() / rows])
    names = ("router_load_max", "router_load_min", "router_imbalance", "router_logsumexp")
    return dict(zip(names, sums / len(logits), strict=True))


def load_balancing_loss(logits: Sequence[Tensor], counted_R: Tensor, top_k: int) -> Tensor:
    """Return E times the sum over the experts of (share of assignments) x (mean probability).

    Args:
        logits: router logits [R, E] of each layer.
        counted_R: 1 for states that count, 0 for padding.
        top_k: number of experts per token.
    """
    experts = logits[0].shape[-1]
    assigned_E = torch.zeros(experts, device=counted_R.device)
    probability_E = torch.zeros(experts, device=counted_R.device)
    for logits_RE in logits:
        # Probabilities keep the router's dtype and so its rounding. Sums are float32.
        probability_RE = logits_RE.softmax(-1)
        chosen_RK = probability_RE.topk(top_k, dim=-1).indices
        assigned_E = assigned_E.index_add(0, chosen_RK.flatten(), counted_R.repeat_interleave(top_k))
        probability_E = probability_E + (probability_RE.float() * counted_R.unsqueeze(-1)).sum(0)
    # Sequences of one token have no counted row; the loss is 0 then.
    rows = (counted_R.sum() * len(logits)).clamp(min=1)
    return experts * (assigned_E / rows * probability_E / rows).sum()

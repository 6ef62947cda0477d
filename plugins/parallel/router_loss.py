"""The load-balancing loss of a mixture of experts: tokens are to be spread over the experts.

Fedus et al. 2021 ("Switch Transformers"), eq. 4 to 6, over all layers together, as transformers computes it.

Legend: `B` sequences, `R` states of a layer that are routed, `E` experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from components.batch import Batch


class Routers:
    """The routers of a model, of which a dense one has none."""

    def __init__(self, model: nn.Module) -> None:
        """Find them, by what transformers says of the model's class."""
        recorders = [
            recorder
            for module in model.modules()
            if (recorder := (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")) is not None
        ]
        self._index = recorders[0].index if recorders else 0
        kinds = tuple({recorder.target_class for recorder in recorders})
        self._routers = [module for module in model.modules() if isinstance(module, kinds)]
        config: Any = getattr(model, "config", None) or getattr(getattr(model, "backbone", None), "config", None)
        self._top_k = config.get_text_config().num_experts_per_tok if self._routers else 0

    def __bool__(self) -> bool:
        return bool(self._routers)

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """Inside, a list grows by the logits [R, E] of each layer in a forward pass."""
        seen: list[Tensor] = []

        def note(_: nn.Module, __: Any, output: Any) -> None:
            logits = output[self._index] if isinstance(output, tuple) else output
            seen.append(logits.flatten(0, -2))

        # The logits are not to come again when activations are recomputed, which is after this.
        handles = [router.register_forward_hook(note) for router in self._routers]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def loss(self, logits: Sequence[Tensor], micro: Batch, packed: bool) -> Tensor:
        """[] float32; K, the experts of a token, where all experts have equal shares, up to E where K have all.

        Args:
            logits: [R, E] of each layer.
            micro: the sequences that were computed.
            packed: end to end; otherwise with padding, which is not counted.
        """
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
        return load_balancing_loss(logits, counted_R, self._top_k)


def row_share(micro: Batch, minibatch: Batch) -> float:
    """Return the share of an optimizer step's routed rows that a micro-batch has.

    All sequences count, also those without a token to learn: they are routed like the others. Each counts by the
    tokens that something is predicted from, as transformers weighs them in one batch.
    """
    rows = minibatch.num_tokens - len(minibatch)
    return (micro.num_tokens - len(micro)) / max(1, rows)


def load_balancing_loss(logits: Sequence[Tensor], counted_R: Tensor, top_k: int) -> Tensor:
    """E times the sum over the experts of (share of assignments) x (mean probability).

    Args:
        logits: [R, E] of each layer.
        counted_R: 1 for what counts, 0 for padding.
        top_k: experts of a token.
    """
    experts = logits[0].shape[-1]
    assigned_E = torch.zeros(experts, device=counted_R.device)
    probability_E = torch.zeros(experts, device=counted_R.device)
    for logits_RE in logits:
        # As the router rounds them; sums are float32.
        probability_RE = logits_RE.softmax(-1)
        chosen_RK = probability_RE.topk(top_k, dim=-1).indices
        assigned_E = assigned_E.index_add(0, chosen_RK.flatten(), counted_R.repeat_interleave(top_k))
        probability_E = probability_E + (probability_RE.float() * counted_R.unsqueeze(-1)).sum(0)
    # Sequences of one token have no counted row; the loss is 0 then.
    rows = (counted_R.sum() * len(logits)).clamp(min=1)
    return experts * (assigned_E / rows * probability_E / rows).sum()

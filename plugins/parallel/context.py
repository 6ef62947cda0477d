"""Context parallelism: one packed row over several ranks, each of which computes a stretch of its tokens.

All but attention works on the stretch. For attention the ranks exchange: each gets the whole row with a share of the
heads, and gives back all heads of its stretch (DeepSpeed-Ulysses, Jacobs et al. 2023). What a stretch says about its
tokens is gathered, so that losses see the whole row.

Legend: `C` ranks, `U` places of the row, `S` places of a stretch, the last of which may be filled up, `H` query heads,
`K` key heads, `D` size of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

_MARK = "context"


@dataclass(frozen=True)
class Context:
    """The ranks that share rows, in the order of their stretches."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """C."""
        return self.group.size()

    def stretch(self, x_1U: Tensor) -> Tensor:
        """[1, S] this rank's, of a row of numbers; 0 where the row is filled up."""
        size = math.ceil(x_1U.shape[1] / self.size)
        filled = pad(x_1U, (0, self.size * size - x_1U.shape[1]))
        return filled.narrow(1, self.group.rank() * size, size)

    def inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model is called with for this rank's stretch of a row, as `packed_inputs` makes it."""
        own = {name: self.stretch(inputs[name]) for name in ("input_ids", "position_ids")}
        inputs["packed_row"].context = self
        return inputs | own

    def whole(self, x_S: Tensor, places: int) -> Tensor:
        """[U] of all stretches. Each rank has the gradient of all of it, and passes on that of its own stretch: the
        gradients of all ranks add up to that of one loss.
        """
        return _Gather.apply(x_S, self.group)[:places]

    def by_heads(
        self, query_1HSD: Tensor, key_1KSD: Tensor, value_1KSD: Tensor, places: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The whole row, [1, heads / C, U, D] each, with this rank's heads. Key heads are there as often as it takes
        that each rank gets as many, those of its query heads.
        """
        repeats = math.lcm(key_1KSD.shape[1], self.size) // key_1KSD.shape[1]
        key_1KSD, value_1KSD = (x.repeat_interleave(repeats, 1) for x in (key_1KSD, value_1KSD))
        return self._heads(query_1HSD, places), self._heads(key_1KSD, places), self._heads(value_1KSD, places)

    def _heads(self, x_1HSD: Tensor, places: int) -> Tensor:
        x_CHSD = x_1HSD[0].unflatten(0, (self.size, -1))
        x_HCSD = _Exchange.apply(x_CHSD, self.group).transpose(0, 1)
        return x_HCSD.flatten(1, 2)[None, :, :places]

    def by_places(self, x_1UHD: Tensor) -> Tensor:
        """[1, S, H, D] all heads of this rank's stretch, of the whole row with its heads, [1, U, H / C, D]."""
        size = math.ceil(x_1UHD.shape[1] / self.size)
        filled = pad(x_1UHD[0], (0, 0, 0, 0, 0, self.size * size - x_1UHD.shape[1]))
        x_CSHD = _Exchange.apply(filled.unflatten(0, (self.size, size)), self.group)
        return x_CSHD.transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, x_H: Tensor) -> Tensor:
        """[H / C] of a number for each head those of this rank's."""
        return x_H.chunk(self.size)[self.group.rank()]


def context_of(model: nn.Module) -> Context | None:
    """The ranks that share the rows of a model, or of the model in an engine; None: each has rows of its own."""
    return getattr(model, _MARK, None)


def mark_context(model: nn.Module, context: Context) -> None:
    """Note at a model who shares its rows."""
    setattr(model, _MARK, context)


class _Exchange(torch.autograd.Function):
    """Part c goes to rank c; what it sent comes in its place. The gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = x.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """[C * S, ...] of [S, ...] on each rank."""

    @staticmethod
    def forward(ctx: Any, x_S: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.size = group, len(x_S)
        parts_CS = x_S.new_empty(group.size(), *x_S.shape)
        dist.all_gather(list(parts_CS), x_S.contiguous(), group=group)
        return parts_CS.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.narrow(0, ctx.group.rank() * ctx.size, ctx.size), None

"""Context parallelism: one packed row over several ranks, each of which computes a slice of its tokens.

All but attention works on the slice. For attention the ranks exchange: each gets the whole row with a share of the
heads, and gives back all heads of its slice (DeepSpeed-Ulysses, Jacobs et al. 2023). Results for the tokens of a slice
are gathered, so that losses see the whole row.

Legend: `C` ranks, `U` places of the row, `S` places of a slice, the last of which may be filled up, `H` query heads,
`K` key heads, `D` size of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from components.models.packing.layout import packs
from components.models.packing.packed_model import use_own_attention
from components.models.packing.row_slices import RowSlices, set_row_slices


class ContextSlices(RowSlices):
    """Slices of the ranks of a group, in their order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """
        Args:
            group: the ranks that share rows.
        """
        self.group = group

    @property
    def size(self) -> int:
        """C."""
        return self.group.size()

    @property
    def is_sliced(self) -> bool:
        return True

    def own_slice(self, x_1U: Tensor) -> Tensor:
        """Return this rank's slice [1, S]; 0 where the row is filled up."""
        size = math.ceil(x_1U.shape[1] / self.size)
        filled = pad(x_1U, (0, self.size * size - x_1U.shape[1]))
        return filled.narrow(1, self.group.rank() * size, size)

    def own_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for this rank's slice; the row of `inputs` is sliced from then on."""
        sliced = {name: self.own_slice(inputs[name]) for name in ("input_ids", "position_ids")}
        inputs["packed_row"].slices = self
        return inputs | sliced

    def gather(self, x_S: Tensor, places: int) -> Tensor:
        """Return [U] of all slices. Each rank has the gradient of all of it, and passes on that of its own slice."""
        return _Gather.apply(x_S, self.group)[:places]

    def to_heads(
        self, query_1HSD: Tensor, key_1KSD: Tensor, value_1KSD: Tensor, places: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the whole row, [1, heads / C, U, D] each, with this rank's heads.

        Key heads are repeated until each rank gets as many, those of its query heads.
        """
        repeats = math.lcm(key_1KSD.shape[1], self.size) // key_1KSD.shape[1]
        key_1KSD, value_1KSD = (x.repeat_interleave(repeats, 1) for x in (key_1KSD, value_1KSD))
        return self._heads(query_1HSD, places), self._heads(key_1KSD, places), self._heads(value_1KSD, places)

    def _heads(self, x_1HSD: Tensor, places: int) -> Tensor:
        x_CHSD = x_1HSD[0].unflatten(0, (self.size, -1))
        x_HCSD = _Exchange.apply(x_CHSD, self.group).transpose(0, 1)
        return x_HCSD.flatten(1, 2)[None, :, :places]

    def from_heads(self, x_1UHD: Tensor) -> Tensor:
        """Return [1, S, H, D], all heads of this rank's slice, of the whole row with its heads, [1, U, H / C, D]."""
        size = math.ceil(x_1UHD.shape[1] / self.size)
        filled = pad(x_1UHD[0], (0, 0, 0, 0, 0, self.size * size - x_1UHD.shape[1]))
        x_CSHD = _Exchange.apply(filled.unflatten(0, (self.size, size)), self.group)
        return x_CSHD.transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, x_H: Tensor) -> Tensor:
        """Return this rank's [H / C] of one number per head."""
        return x_H.chunk(self.size)[self.group.rank()]


def slice_rows(model: nn.Module, group: dist.ProcessGroup, tensor: int = 1) -> None:
    """Let the ranks of a group compute each row of `model` together.

    Args:
        model: policy or value model.
        group: the ranks.
        tensor: number of ranks of the tensor axis, which have a share of the heads each.

    Raises:
        ValueError: the model's sequences are padded, or its heads or positions cannot be shared.
    """
    inner: Any = getattr(model, "backbone", model)
    if not packs(inner):
        raise ValueError(
            f"parallel.context={group.size()} shares packed rows, and {type(inner).__name__} pads its sequences; set "
            "train.packing=true for the reason, or parallel.context=1"
        )
    text: Any = inner.config.get_text_config()
    heads = text.num_attention_heads // tensor
    if heads % group.size():
        raise ValueError(
            f"parallel.context={group.size()} does not divide the {heads} attention heads of {type(inner).__name__}, "
            f"which the ranks share after parallel.tensor={tensor}; set a divisor of them"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"the rotary positions of {type(inner).__name__} ({kind}) depend on the longest sequence, and a rank of "
            f"parallel.context={group.size()} sees a part of it; set parallel.context=1"
        )
    use_own_attention(inner)
    set_row_slices(inner, ContextSlices(group))


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

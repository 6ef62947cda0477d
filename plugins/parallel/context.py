"""Context parallelism: a packed row is split over several ranks, and each rank computes a slice of its tokens.

All layers except attention operate on the slice. For attention an all-to-all gives each rank the complete row with a
subset of the heads, and a second one returns all heads of its slice (DeepSpeed-Ulysses, Jacobs et al. 2023). Results
per token are gathered, so that losses see the complete row.

Legend: `C` ranks, `U` positions of the row, `S` positions of a slice (the last slice may be padded), `H` query heads,
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
    """Slices of a row, one per rank of a group, in the order of the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """
        Args:
            group: the ranks that share rows.
        """
        self.group = group
        self._places = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @property
    def is_sliced(self) -> bool:
        return True

    def own_slice(self, x_1U: Tensor) -> Tensor:
        """Return this rank's slice [1, S], padded with 0."""
        size = math.ceil(x_1U.shape[1] / self.size)
        filled = pad(x_1U, (0, self.size * size - x_1U.shape[1]))
        return filled.narrow(1, self.group.rank() * size, size)

    def own_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the model's arguments for this rank's slice. Marks the packed row of `inputs` as sliced."""
        self._places = inputs["input_ids"].numel()
        sliced = {name: self.own_slice(inputs[name]) for name in ("input_ids", "position_ids")}
        inputs["packed_row"].slices = self
        return inputs | sliced

    def is_filled(self, device: torch.device) -> Tensor:
        """Return [S] bool: positions of this rank's slice that belong to the last row of `own_inputs`, and not to
        padding.
        """
        size = math.ceil(self._places / self.size)
        return torch.arange(size, device=device) < self._places - self.group.rank() * size

    def gather(self, x_S: Tensor, places: int) -> Tensor:
        """Gather the slices into [U]. In the backward pass each rank keeps the gradient of its own slice."""
        return _Gather.apply(x_S, self.group)[:places]

    def to_heads(
        self, query_1HSD: Tensor, key_1KSD: Tensor, value_1KSD: Tensor, places: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of the complete row with this rank's heads, [1, heads / C, U, D] each.

        Key and value heads are repeated until C divides their number. Each rank gets those of its query heads.
        """
        repeats = math.lcm(key_1KSD.shape[1], self.size) // key_1KSD.shape[1]
        key_1KSD, value_1KSD = (x.repeat_interleave(repeats, 1) for x in (key_1KSD, value_1KSD))
        return self._heads(query_1HSD, places), self._heads(key_1KSD, places), self._heads(value_1KSD, places)

    def _heads(self, x_1HSD: Tensor, places: int) -> Tensor:
        x_CHSD = x_1HSD[0].unflatten(0, (self.size, -1))
        x_HCSD = _Exchange.apply(x_CHSD, self.group).transpose(0, 1)
        return x_HCSD.flatten(1, 2)[None, :, :places]

    def from_heads(self, x_1UHD: Tensor) -> Tensor:
        """Return all heads of this rank's slice, [1, S, H, D], from this rank's heads of the row, [1, U, H / C, D]."""
        size = math.ceil(x_1UHD.shape[1] / self.size)
        filled = pad(x_1UHD[0], (0, 0, 0, 0, 0, self.size * size - x_1UHD.shape[1]))
        x_CSHD = _Exchange.apply(filled.unflatten(0, (self.size, size)), self.group)
        return x_CSHD.transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, x_H: Tensor) -> Tensor:
        """Return this rank's part [H / C] of a tensor with one number per head."""
        return x_H.chunk(self.size)[self.group.rank()]


def slice_rows(model: nn.Module, group: dist.ProcessGroup, tensor: int = 1) -> None:
    """Apply context parallelism to `model`, in place.

    Args:
        model: policy or value model.
        group: the ranks that share a row.
        tensor: number of ranks of the tensor axis, each of which has a subset of the heads.

    Raises:
        ValueError: the model's sequences are padded, or its heads or positions cannot be split.
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
    # Each rank would scale its positions by the length of its own slice.
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"the rotary positions of {type(inner).__name__} ({kind}) depend on the longest sequence, and a rank of "
            f"parallel.context={group.size()} sees a part of it; set parallel.context=1"
        )
    use_own_attention(inner)
    set_row_slices(inner, ContextSlices(group))


class _Exchange(torch.autograd.Function):
    """All-to-all: sends part c to rank c and receives its part in exchange. The backward pass exchanges gradients."""

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
    """All-gather of [S, ...] to [C * S, ...]."""

    @staticmethod
    def forward(ctx: Any, x_S: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.size = len(x_S)
        parts_CS = x_S.new_empty(group.size(), *x_S.shape)
        dist.all_gather(list(parts_CS), x_S.contiguous(), group=group)
        return parts_CS.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.narrow(0, ctx.group.rank() * ctx.size, ctx.size), None

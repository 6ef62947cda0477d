"""Slice of a packed row that a rank computes.

By default each rank computes whole rows. A plug-in whose ranks compute a row together sets `RowSlices` of its own on
the model, once, with `set_row_slices`.

Legend: `U` places of the row, `S` places of this rank's slice, `H` query heads, `K` key heads, `D` size of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_MARK = "row_slices"


class RowSlices:
    """The default: this rank computes complete rows."""

    @property
    def is_sliced(self) -> bool:
        """True if several ranks compute each row together."""
        return False

    def own_slice(self, x_1U: Tensor) -> Tensor:
        """Return this rank's slice [1, S] of one number per place."""
        return x_1U

    def own_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model for this rank's slice of a row that `packed_inputs` made."""
        return inputs

    def gather(self, x_S: Tensor, places: int) -> Tensor:  # noqa: ARG002 - a whole row needs no cutting
        """Gather the slices of all ranks, [U]. The gradients of all ranks add up to that of one loss.

        Args:
            x_S: [S] slice of this rank.
            places: U, the number of places of the row.
        """
        return x_S

    def to_heads(
        self,
        query_1HSD: Tensor,
        key_1KSD: Tensor,
        value_1KSD: Tensor,
        places: int,  # noqa: ARG002 - as above
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the whole row with this rank's share of the heads, before attention."""
        return query_1HSD, key_1KSD, value_1KSD

    def from_heads(self, x_1UHD: Tensor) -> Tensor:
        """Return [1, S, H, D], all heads of this rank's slice, after attention."""
        return x_1UHD

    def own_heads(self, x_H: Tensor) -> Tensor:
        """Return this rank's share of one number per head."""
        return x_H


WHOLE_ROWS = RowSlices()


def set_row_slices(model: nn.Module, slices: RowSlices) -> None:
    """Set the slices in which the rows of a model are computed."""
    setattr(model, _MARK, slices)


def row_slices(model: nn.Module) -> RowSlices:
    """Return the slices of a model, or of the model in an engine."""
    return getattr(model, _MARK, WHOLE_ROWS)

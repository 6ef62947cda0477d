"""Shares of the ranks in a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.batch import Batch


def check_shares(ranks: int, train: Batch, heldout: Batch | None) -> None:
    """Check that every rank gets at least one response of a batch that is split over the ranks.

    Raises:
        ValueError: a batch has fewer responses than ranks. The message says what to set.
    """
    checks = {
        "train on": (train, "use more data"),
        "evaluate": (heldout, "set evaluation.held_out higher, give a longer evaluation.path"),
    }
    for purpose, (batch, remedy) in checks.items():
        if batch is not None and len(batch) < ranks:
            raise ValueError(
                f"{len(batch)} responses to {purpose} are too few for {ranks} ranks, each of which needs one or more; "
                f"{remedy}, or set placement.ranks_per_node lower"
            )

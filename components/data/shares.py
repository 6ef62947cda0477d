"""Shares of the ranks in a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.batch import Batch


def check_shares(ranks: int, train: Batch, heldout: Batch | None) -> None:
    """Check that every rank gets a response of a batch that is split over the ranks.

    Raises:
        ValueError: there are too few; the message says what to set.
    """
    ways = {
        "train on": (train, "give more"),
        "evaluate": (heldout, "set evaluation.held_out higher, give a longer evaluation.path"),
    }
    for use, (batch, mend) in ways.items():
        if batch is not None and len(batch) < ranks:
            raise ValueError(
                f"{len(batch)} responses to {use} are too few for {ranks} ranks, each of which takes one or more; "
                f"{mend}, or set placement.ranks_per_node lower"
            )

"""Splitting of a data set into calls of bounded size."""

from itertools import pairwise

from components.batch import Batch

from .algorithm import PAIR

PAIRS_PER_CALL = 1024
"""Maximum number of pairs per rank in one call."""


def in_calls(batch: Batch, ranks: int) -> list[Batch]:
    """Split a batch into equal parts of at most `PAIRS_PER_CALL` pairs per rank.

    A rank reports no progress within a call, so a call on a whole data set could exceed stall_timeout.
    """
    count = -(-len(batch) // (PAIR * PAIRS_PER_CALL * ranks))
    edges = [len(batch) * part // count for part in range(count + 1)]
    return [batch[start:end] for start, end in pairwise(edges)]

"""How many pairs a rank is asked about at once."""

from itertools import pairwise

from components.batch import Batch

from .algorithm import PAIR

PAIRS_PER_CALL = 1024
"""That a rank is asked about at once, at most."""


def in_calls(batch: Batch, ranks: int) -> list[Batch]:
    """A batch in equal parts, none so large that stall_timeout could take a rank that works on it for hung."""
    count = -(-len(batch) // (PAIR * PAIRS_PER_CALL * ranks))
    edges = [len(batch) * part // count for part in range(count + 1)]
    return [batch[start:end] for start, end in pairwise(edges)]

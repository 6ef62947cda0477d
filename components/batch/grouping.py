"""Groups of the sequences of a batch, by the value of a column."""

from itertools import chain
from typing import Any

from components.batch import ragged
from components.batch.batch import Batch


def group_by(batch: Batch, name: str) -> dict[Any, Batch]:
    """Group the sequences by the value of a column, for example the responses by prompt.

    Args:
        batch: the batch.
        name: name of a per-sequence column of integers [B], or of a column of hashable objects.

    Returns:
        Value -> batch, in the order of first occurrence. Integers are Python integers, and sequences keep their
        order. All batches are views of one copy. Building a batch takes 10 to 30 us, which is seconds for 200,000
        groups.

    Raises:
        ValueError: the column is of another kind, or an object is not hashable.
    """
    groups: dict[Any, list[int]] = {}
    for i, key in enumerate(_keys(batch, name)):
        try:
            groups.setdefault(key, []).append(i)
        except TypeError as error:
            raise ValueError(f"group_by {name!r}: sequence {i} has a {type(key).__name__}; make it text") from error
    # One copy in the order of the groups, of which every group is a contiguous view.
    order = list(chain.from_iterable(groups.values()))
    return dict(zip(groups, batch.select(order).parts([len(group) for group in groups.values()]), strict=True))


def _keys(batch: Batch, name: str) -> list[Any]:
    if name in batch.objects:
        return batch.objects[name]
    if name not in batch:
        raise batch.no_column(name)
    x = batch[name]
    if name in batch.per_token or x.dim() != 1 or not ragged.holds_integers(x):
        kind = "per-token" if name in batch.per_token else "per-sequence"
        raise ValueError(
            f"group_by {name!r}: the {kind} column has dtype {x.dtype} and shape {list(x.shape)}; name a "
            "per-sequence column of integers [B], or a column of objects"
        )
    return x.tolist()

"""Batches that tell where each of their tokens was, and the batch as plain Python."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from components.batch import Batch

ragged_lengths = st.lists(st.integers(0, 6), max_size=9)


def batch_of(lengths: Sequence[int]) -> Batch:
    """Sequence i holds the tokens 100 i, 100 i + 1, ...; so every token tells where it was."""
    return Batch.from_rows(
        {"tokens": [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]},
        {"reward": torch.arange(len(lengths)) / 2},
        {"label": [f"label {i}" for i in range(len(lengths))]},
    ).with_tokens(action_mask=torch.arange(sum(lengths)) % 2 == 1)


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    """The batch as plain Python, one tuple per sequence."""
    return [
        (
            batch.row(i, "tokens").tolist(),
            batch.row(i, "action_mask").tolist(),
            batch["reward"][i].item(),
            batch["label"][i],
        )
        for i in range(len(batch))
    ]


def with_everything() -> Batch:
    """Three sequences, one of them empty, and columns of all kinds."""
    return batch_of([2, 0, 3]).with_sequences(
        matrix=torch.arange(12).view(3, 2, 2), half=torch.tensor([0.5, 1.0, 1.5], dtype=torch.bfloat16)
    )


def assert_alike(actual: Batch, expected: Batch) -> None:
    """The same columns in the same order, with the same numbers."""
    assert actual.names == expected.names
    assert (list(actual.per_token), list(actual.per_sequence)) == (
        list(expected.per_token),
        list(expected.per_sequence),
    )
    assert torch.equal(actual.lengths, expected.lengths)
    for name in expected.names:
        left, right = actual[name], expected[name]
        if isinstance(right, torch.Tensor):
            assert (left.dtype, left.shape) == (right.dtype, right.shape)
            left, right = left.tolist(), right.tolist()
        # As text, where NaN is NaN, -0.0 is not 0.0, and 1 is neither 1.0 nor True.
        assert repr(left) == repr(right)

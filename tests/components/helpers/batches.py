"""Batches whose tokens identify their position, and batches as plain Python values."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from components.batch import Batch

ragged_lengths = st.lists(st.integers(0, 6), max_size=9)
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)

numbers = st.floats(width=16) | st.sampled_from([0.0, -0.0, 1.0])
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


def batch_of(lengths: Sequence[int]) -> Batch:
    """Return a batch whose sequence i has the tokens 100 i, 100 i + 1, ... Every token identifies its position."""
    return Batch.from_rows(
        {"tokens": [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]},
        {"reward": torch.arange(len(lengths)) / 2},
        {"label": [f"label {i}" for i in range(len(lengths))]},
    ).with_tokens(action_mask=torch.arange(sum(lengths)) % 2 == 1)


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    """Return the batch as plain Python values, one tuple per sequence."""
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
    """Return three sequences, one of them empty, with columns of all kinds."""
    return batch_of([2, 0, 3]).with_sequences(
        matrix=torch.arange(12).view(3, 2, 2), half=torch.tensor([0.5, 1.0, 1.5], dtype=torch.bfloat16)
    )


def assert_alike(actual: Batch, expected: Batch) -> None:
    """Check that two batches have the same columns in the same order, with equal numbers."""
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
        # Compared as text: NaN equals NaN, -0.0 differs from 0.0, and 1 differs from 1.0 and True.
        assert repr(left) == repr(right)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Strategy for batches of every dtype and shape, with objects of one type or of several types."""
    lengths = draw(st.lists(st.integers(0, 5) | st.integers(0, 40), max_size=6))
    number = len(lengths)
    size = sum(lengths)
    per_token = {}
    per_sequence = {}
    objects = {}
    for i in range(draw(st.integers(0, 3))):
        per_token[f"t{i}"] = tensor_of(draw, [size])
    for i in range(draw(st.integers(0, 3))):
        per_sequence[f"s{i}"] = tensor_of(draw, [number, *draw(st.lists(st.integers(0, 3), max_size=2))])
    for i in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from([st.text(), st.none(), st.text() | st.none(), st.integers(), plain, anything]))
        objects[f"o{i}"] = draw(st.lists(kind, min_size=number, max_size=number))
    return Batch(lengths, per_token, per_sequence, objects)


def tensor_of(draw: st.DrawFn, shape: list[int]) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    few = draw(st.lists(numbers if dtype.is_floating_point else st.integers(-128, 127), min_size=1, max_size=5))
    repeated = torch.tensor(few, dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(dtype)
    return repeated[torch.arange(math.prod(shape)) % len(few)].view(shape)

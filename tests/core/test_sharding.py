"""Splitting of arguments and joining of results, for any length and number of workers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.batch import Batch
from core.sharding import chunk_sizes, is_splittable, join, shard_arguments, split
from tests.messages import says

LENGTHS = st.integers(0, 40)
WORKERS = st.integers(1, 9)


def of_kind(kind: str, length: int) -> Any:
    """Return a splittable value with `length` items."""
    if kind == "list":
        return list(range(length))
    if kind == "array":
        return np.arange(2 * length).reshape(length, 2)
    if kind == "tensor":
        return torch.arange(2 * length).reshape(length, 2)
    return Batch.from_rows({"tokens": [torch.arange(n % 4) for n in range(length)]})


def items_of(value: Any) -> list[Any]:
    """Return the items of a value as plain lists."""
    if isinstance(value, Batch):
        return [value.row(i, "tokens").tolist() for i in range(len(value))]
    return value if isinstance(value, list) else value.tolist()


@given(LENGTHS, WORKERS)
def test_chunk_sizes_differ_by_at_most_one_with_the_larger_first_and_add_up(length: int, workers: int) -> None:
    sizes = chunk_sizes(length, workers)
    assert (sum(sizes), len(sizes)) == (length, workers)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.sampled_from(["list", "array", "tensor", "batch"]), st.integers(1, 20), WORKERS)
def test_joining_the_chunks_restores_the_value(kind: str, length: int, workers: int) -> None:
    value = of_kind(kind, length)
    assert is_splittable(value)
    parts = split(value, workers)
    assert [len(part) for part in parts] == chunk_sizes(length, workers)
    joined = join([part for part in parts if len(part)], "x")
    assert type(joined) is type(value)
    assert items_of(joined) == items_of(value)


def test_numbers_strings_mappings_tuples_and_none_are_not_splittable() -> None:
    for value in (1, 1.5, "abc", b"abc", {"a": [1]}, (1, 2), None, {1, 2}, np.float64(1), np.array(1), torch.tensor(1)):
        assert not is_splittable(value), value


def test_positional_and_keyword_arguments_are_split_together_and_nested_lists_at_the_first_level() -> None:
    calls, length = shard_arguments(([[1, 2], [3], []], "x"), {"k": (1, 2), "v": [7, 8, 9]}, 2, "A.f")
    assert length == 3
    assert calls == [
        (([[1, 2], [3]], "x"), {"k": (1, 2), "v": [7, 8]}),
        (([[]], "x"), {"k": (1, 2), "v": [9]}),
    ]


def test_results_that_cannot_be_joined_raise_an_error_that_names_the_method() -> None:
    with pytest.raises(TypeError, match=says("A.f", "int")):
        join([1, 2], "A.f")

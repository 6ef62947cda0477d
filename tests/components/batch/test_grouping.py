"""Groups of the sequences of a batch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.batch.grouping import group_by
from tests.components.helpers.batches import batch_of, rows_of
from tests.messages import says


def test_groups_have_the_order_of_their_first_sequences() -> None:
    batch = batch_of([1, 2, 0, 1]).with_sequences(prompt_id=torch.tensor([7, -3, 7, 5], dtype=torch.int32))
    groups = group_by(batch, "prompt_id")
    assert list(groups) == [7, -3, 5]
    assert all(type(key) is int for key in groups)
    assert [rows_of(group) for group in groups.values()] == [rows_of(batch.select(i)) for i in ([0, 2], [1], [3])]
    assert groups[7]["tokens"].data_ptr() == groups[7].row(0, "tokens").data_ptr()


def test_an_empty_batch_has_no_groups() -> None:
    assert group_by(batch_of([]), "label") == {}


def test_objects_can_be_keys_of_group_by() -> None:
    groups = group_by(batch_of([1, 2, 3]).with_objects(prompt=["b", None, "b"]), "prompt")
    assert {key: group["label"] for key, group in groups.items()} == {"b": ["label 0", "label 2"], None: ["label 1"]}


def test_group_by_rejects_columns_of_other_kinds() -> None:
    batch = batch_of([1, 2]).with_sequences(pair=torch.zeros(2, 2, dtype=torch.int64), won=torch.tensor([True, False]))
    with pytest.raises(ValueError, match=says("group_by", "'reward'", "dtype torch.float32", "shape [2]", "[B]")):
        group_by(batch, "reward")
    with pytest.raises(ValueError, match=says("'pair'", "per-sequence", "dtype torch.int64 and shape [2, 2]")):
        group_by(batch, "pair")
    with pytest.raises(ValueError, match=says("'won'", "torch.bool")):
        group_by(batch, "won")
    with pytest.raises(ValueError, match=says("'tokens'", "per-token", "dtype torch.int64 and shape [3]")):
        group_by(batch, "tokens")
    with pytest.raises(ValueError, match=says("'label'", "sequence 1 ", "dict")):
        group_by(batch.with_objects(label=["a", {}]), "label")
    with pytest.raises(KeyError, match="'prompt'"):
        group_by(batch, "prompt")


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 2)), max_size=40), st.booleans())
@settings(max_examples=80, deadline=None)
def test_group_by_equals_a_loop_over_the_sequences(drawn: list[tuple[int, int]], as_text: bool) -> None:
    batch = batch_of([length for length, _ in drawn])
    keys = [key for _, key in drawn]
    expected: dict[Any, list[Any]] = {}
    for key, row in zip(keys, rows_of(batch), strict=True):
        expected.setdefault(str(key) if as_text else key, []).append(row)
    if as_text:
        batch = batch.with_objects(key=list(map(str, keys)))
    else:
        batch = batch.with_sequences(key=torch.tensor(keys, dtype=torch.int64))
    actual = {key: rows_of(group) for key, group in group_by(batch, "key").items()}
    assert actual == expected
    assert list(actual) == list(expected)

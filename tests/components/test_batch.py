"""Batch: ragged columns, cut, joined, padded, shared out and sent away."""

import copy
import pickle
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
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


def unpickled(data: bytes) -> Batch:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pickle.loads(data)


# --- what is in it ----------------------------------------------------------------------------------------------


def test_offsets_and_sequence_ids_tell_where_each_token_belongs() -> None:
    batch = batch_of([2, 0, 3])
    assert batch.lengths.tolist() == [2, 0, 3]
    assert batch.offsets.tolist() == [0, 2, 2, 5]
    assert batch.sequence_ids.tolist() == [0, 0, 2, 2, 2]
    assert (len(batch), batch.num_tokens) == (3, 5)
    assert batch["tokens"].tolist() == [0, 1, 200, 201, 202]
    assert batch.row(1, "tokens").tolist() == []
    assert batch.row(-1, "tokens").tolist() == [200, 201, 202]


def test_a_row_is_a_view_of_the_column() -> None:
    batch = batch_of([2, 3])
    assert batch.row(1, "tokens").data_ptr() == batch["tokens"][2:].data_ptr()


def test_columns_are_found_by_name_whatever_their_kind() -> None:
    batch = batch_of([1, 2])
    assert batch.names == ("tokens", "action_mask", "reward", "label")
    assert "label" in batch
    assert "value" not in batch
    assert batch["label"] == ["label 0", "label 1"]
    assert (list(batch.per_token), list(batch.per_sequence), list(batch.objects)) == (
        ["tokens", "action_mask"],
        ["reward"],
        ["label"],
    )


def test_nbytes_counts_tensors_and_lengths() -> None:
    # lengths 2 * 8, tokens 3 * 8, action_mask 3 * 1, reward 2 * 4.
    assert batch_of([1, 2]).nbytes == 16 + 24 + 3 + 8


def test_rows_of_integers_floats_and_bools_keep_what_they_are() -> None:
    batch = Batch.from_rows({"i": [[1], []], "f": [[0.5], []], "b": [[True], []]})
    assert [batch[name].dtype for name in "ifb"] == [torch.int64, torch.float32, torch.bool]


def test_rows_may_mix_lists_and_tensors() -> None:
    batch = Batch.from_rows({"tokens": [[], torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3])]})
    assert batch["tokens"].tolist() == [1, 2, 3]
    assert not batch["tokens"].is_floating_point()


def test_a_batch_can_be_empty() -> None:
    batch = Batch([], {"tokens": torch.zeros(0, dtype=torch.int64)}, {"reward": torch.zeros(0)}, {"label": []})
    assert len(batch) == batch.num_tokens == 0
    assert batch.offsets.tolist() == [0]
    assert batch.padded("tokens", 0).shape == (0, 0)
    assert batch.micro_batch_indices(8) == []
    assert [share.tolist() for share in batch.balanced_shares(2)] == [[], []]
    assert len(Batch.concat([batch, batch]).repeat(3).select([])) == 0


def test_iterating_over_a_batch_is_refused_as_ambiguous() -> None:
    with pytest.raises(TypeError):
        iter(batch_of([1]))  # pyright: ignore[reportArgumentType, reportCallIssue]


# --- wrong input ------------------------------------------------------------------------------------------------


def test_a_column_of_the_wrong_size_is_named() -> None:
    batch = batch_of([1, 2])
    with pytest.raises(ValueError, match=r"per-token column 'value' has shape \[2\], but the batch has 3 tokens"):
        batch.with_tokens(value=torch.zeros(2))
    with pytest.raises(ValueError, match=r"per-sequence column 'score' has shape \[3\].* 2 sequences"):
        batch.with_sequences(score=torch.zeros(3))
    with pytest.raises(ValueError, match="object column 'text' has 1 items for 2 sequences"):
        batch.with_objects(text=["a"])


def test_a_per_token_column_has_one_dimension() -> None:
    with pytest.raises(ValueError, match=r"'value' has shape \[3, 1\]; it must be \[N\]"):
        batch_of([1, 2]).with_tokens(value=torch.zeros(3, 1))


def test_a_column_that_is_no_tensor_is_named() -> None:
    with pytest.raises(ValueError, match=r"'reward' is a list; make it a tensor"):
        Batch([1], {"tokens": torch.zeros(1)}, {"reward": [0.5]})  # pyright: ignore[reportArgumentType]


def test_a_name_belongs_to_one_kind_only() -> None:
    with pytest.raises(ValueError, match="column 'reward' is there twice"):
        batch_of([1, 2]).with_tokens(reward=torch.zeros(3))
    with pytest.raises(ValueError, match="'lengths' is the batch's own lengths"):
        batch_of([1, 2]).with_sequences(lengths=torch.zeros(2))


def test_a_column_on_another_device_is_named() -> None:
    with pytest.raises(ValueError, match=r"'value' is on meta, the batch on cpu; move one with \.to\(\)"):
        batch_of([1]).with_tokens(value=torch.zeros(1, device="meta"))


def test_lengths_are_non_negative_integers() -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] is -1"):
        Batch([2, -1], {})
    with pytest.raises(ValueError, match=r"must be \[B\] integers"):
        Batch(torch.tensor([1.0]), {})


def test_ragged_rows_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match="row 1 of 'value' has 1 entries, but that of 'tokens' has 2"):
        Batch.from_rows({"tokens": [[1], [2, 3]], "value": [[0.0], [0.0]]})
    with pytest.raises(ValueError, match="'value' has 1 rows, but 'tokens' has 2"):
        Batch.from_rows({"tokens": [[1], [2, 3]], "value": [[0.0]]})
    with pytest.raises(ValueError, match="at least one per-token column"):
        Batch.from_rows({})


def test_a_missing_column_lists_those_that_are_there() -> None:
    batch = batch_of([1])
    for attempt in (lambda: batch["value"], lambda: batch.without("value"), lambda: batch.only("value")):
        with pytest.raises(KeyError, match="no column 'value'; the batch has tokens, action_mask, reward, label"):
            attempt()
    with pytest.raises(KeyError, match="no column 'value'"):
        batch.padded("value", 0)
    with pytest.raises(ValueError, match="'reward' is no per-token column; those are tokens, action_mask"):
        batch.row(0, "reward")


def test_a_position_outside_the_batch_is_refused() -> None:
    batch = batch_of([1, 2])
    with pytest.raises(ValueError, match="sequence 2 from a batch of 2"):
        batch.select([0, 2])
    with pytest.raises(ValueError, match="sequence -3 from a batch of 2"):
        batch.select([-3])
    with pytest.raises(ValueError, match="sequence 2 of a batch of 2"):
        batch.row(2, "tokens")
    with pytest.raises(ValueError, match="bool index of 3 entries for 2 sequences"):
        batch.select([True, False, True])
    with pytest.raises(ValueError, match="integer positions"):
        batch.select(torch.tensor([0.0]))


@pytest.mark.parametrize("method", ["split", "repeat", "micro_batch_indices", "balanced_shares"])
def test_counts_below_one_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match="0: it must be at least 1"):
        getattr(batch_of([1]), method)(0)


# --- other columns ----------------------------------------------------------------------------------------------


def test_adding_a_column_leaves_the_old_batch_as_it_was() -> None:
    old = batch_of([1, 2])
    new = old.with_tokens(value=torch.ones(3), tokens=torch.zeros(3)).with_sequences(reward=torch.ones(2))
    assert "value" not in old
    assert old["tokens"].tolist() == [0, 100, 101]
    assert old["reward"].tolist() == [0.0, 0.5]
    assert new["tokens"].tolist() == [0, 0, 0]
    assert new["reward"].tolist() == [1.0, 1.0]
    assert new.with_objects(label=["a", "b"])["label"] == ["a", "b"]


def test_only_and_without_choose_columns_and_keep_the_lengths() -> None:
    batch = batch_of([1, 2])
    assert batch.without("label", "tokens").names == ("action_mask", "reward")
    assert batch.only("label", "tokens").names == ("tokens", "label")
    assert batch.only("reward").lengths.tolist() == [1, 2]


def test_writable_copies_the_tensors() -> None:
    old = batch_of([1, 2])
    new = old.writable()
    new["tokens"].fill_(7)
    new["reward"].fill_(7)
    new["label"].append("more")
    assert rows_of(old) == rows_of(batch_of([1, 2]))


def test_all_tensors_move_to_a_device() -> None:
    batch = batch_of([1, 2]).to("cpu")
    assert {x.device.type for x in (batch.lengths, batch["tokens"], batch["reward"])} == {"cpu"}


# --- other sequences --------------------------------------------------------------------------------------------


def test_select_takes_any_order_and_repeats() -> None:
    batch = batch_of([2, 0, 3])
    chosen = batch.select([2, 0, 2, 1, -1])
    assert rows_of(chosen) == [rows_of(batch)[i] for i in (2, 0, 2, 1, 2)]


def test_select_takes_slices_tensors_and_masks() -> None:
    batch = batch_of([2, 0, 3, 1])
    rows = rows_of(batch)
    assert rows_of(batch.select(slice(1, 3))) == rows_of(batch[1:3]) == rows[1:3]
    assert rows_of(batch.select(slice(None, None, -2))) == rows[::-2]
    assert rows_of(batch.select(slice(3, 1))) == []
    assert rows_of(batch.select(torch.tensor([3, 0], dtype=torch.int32))) == [rows[3], rows[0]]
    assert rows_of(batch.select(torch.tensor([True, False, False, True]))) == [rows[0], rows[3]]
    assert rows_of(batch.select([])) == []


@given(ragged_lengths, st.data())
@settings(max_examples=60, deadline=None)
def test_select_is_indexing_each_row(lengths: list[int], data: st.DataObject) -> None:
    batch = batch_of(lengths)
    index = data.draw(st.lists(st.integers(-len(lengths), len(lengths) - 1), max_size=8)) if lengths else []
    assert rows_of(batch.select(index)) == [rows_of(batch)[i] for i in index]


def test_split_gives_the_larger_chunks_first() -> None:
    chunks = batch_of([1, 2, 3, 4, 5]).split(3)
    assert [chunk.lengths.tolist() for chunk in chunks] == [[1, 2], [3, 4], [5]]
    assert [len(chunk) for chunk in batch_of([1, 2]).split(3)] == [1, 1, 0]


@given(ragged_lengths, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_sharding_and_unsharding_give_the_batch_back(lengths: list[int], n: int) -> None:
    batch = batch_of(lengths)
    parts = batch.__shard__(n)
    assert len(parts) == n
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert rows_of(Batch.__unshard__(parts)) == rows_of(batch)


def test_concat_refuses_batches_that_differ() -> None:
    batch = batch_of([1])
    with pytest.raises(ValueError, match=r"batches 0 and 1 .* per_sequence columns: only one has \['reward'\]"):
        Batch.concat([batch, batch.without("reward")])
    with pytest.raises(ValueError, match=r"'tokens' of concat is torch.int64 \[1\] in one batch and torch.float32"):
        Batch.concat([batch, batch.with_tokens(tokens=torch.ones(1))])
    with pytest.raises(ValueError, match="'reward' of concat"):
        Batch.concat([batch, batch.with_sequences(reward=torch.ones(1, 2))])
    with pytest.raises(ValueError, match="at least one batch"):
        Batch.concat([])


def test_an_empty_part_does_not_change_the_dtype() -> None:
    nothing = Batch.from_rows({"tokens": [[]]})
    assert nothing["tokens"].is_floating_point()
    both = Batch.concat([nothing, Batch.from_rows({"tokens": [[5]]})])
    assert both["tokens"].dtype == torch.int64
    assert both.lengths.tolist() == [0, 1]


def test_copies_of_one_sequence_are_adjacent() -> None:
    assert batch_of([1, 2]).repeat(2)["tokens"].tolist() == [0, 0, 100, 101, 100, 101]
    assert batch_of([1, 2]).repeat(2)["label"] == ["label 0", "label 0", "label 1", "label 1"]


# --- sums, padding ----------------------------------------------------------------------------------------------


def test_tokens_are_summed_within_each_sequence() -> None:
    batch = batch_of([2, 0, 3])
    assert batch.sum_tokens(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])).tolist() == [3.0, 0.0, 28.0]
    assert batch.sum_tokens(torch.tensor([True, False, True, True, True])).tolist() == [1, 0, 3]
    with pytest.raises(ValueError, match=r"shape \[3\] in a batch of 5 tokens"):
        batch.sum_tokens(torch.zeros(3))


def test_a_nan_stays_in_its_own_sequence() -> None:
    sums = batch_of([1, 2]).sum_tokens(torch.tensor([float("nan"), 1.0, 2.0]))
    assert sums[1] == 3.0
    assert sums[0].isnan()


def test_padding_goes_to_the_side_that_is_asked_for() -> None:
    batch = batch_of([2, 0, 3])
    assert batch.padded("tokens", -1).tolist() == [[0, 1, -1], [-1, -1, -1], [200, 201, 202]]
    assert batch.padded("tokens", -1, "left").tolist() == [[-1, 0, 1], [-1, -1, -1], [200, 201, 202]]
    assert batch.padding_mask().tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert batch.padding_mask("left").tolist() == [[False, True, True], [False] * 3, [True] * 3]
    with pytest.raises(ValueError, match="side='middle'; it must be 'left' or 'right'"):
        batch.padding_mask("middle")  # pyright: ignore[reportArgumentType]


@given(ragged_lengths, st.sampled_from(["left", "right"]))
@settings(max_examples=60, deadline=None)
def test_unpad_undoes_padded(lengths: list[int], side: Any) -> None:
    batch = batch_of(lengths)
    assert torch.equal(Batch.unpad(batch.padded("tokens", -1, side), batch.lengths, side), batch["tokens"])


def test_unpad_takes_a_rectangle_wider_than_needed_but_none_too_small() -> None:
    lengths = torch.tensor([1, 2])
    wide = torch.arange(8).view(2, 4)
    assert Batch.unpad(wide, lengths).tolist() == [0, 4, 5]
    assert Batch.unpad(wide, lengths, "left").tolist() == [3, 6, 7]
    with pytest.raises(ValueError, match="the longest of 2 tokens"):
        Batch.unpad(wide[:, :1], lengths)
    with pytest.raises(ValueError, match="for 2 sequences"):
        Batch.unpad(wide[:1], lengths)


def test_gradients_flow_through_padding_and_back() -> None:
    value_N = torch.ones(5, requires_grad=True)
    batch = batch_of([2, 0, 3]).with_tokens(value=value_N)
    (Batch.unpad(batch.padded("value", 0.0), batch.lengths) * torch.arange(5)).sum().backward()
    assert value_N.grad is not None
    assert value_N.grad.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


# --- sharing the work -------------------------------------------------------------------------------------------


def test_micro_batches_fit_the_budget_when_padded() -> None:
    # Sorted lengths 1 2 2 3 9: 3 rows of 2 fill the budget of 6; 3 is alone since 2 rows of 9 are 18; 9 is too long.
    indices = batch_of([2, 9, 1, 3, 2]).micro_batch_indices(6)
    assert [index.tolist() for index in indices] == [[2, 0, 4], [3], [1]]


@given(ragged_lengths, st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_micro_batches_take_every_sequence_once_and_as_many_as_fit(lengths: list[int], max_tokens: int) -> None:
    cuts = [index.tolist() for index in batch_of(lengths).micro_batch_indices(max_tokens)]
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * max(lengths[i] for i in cut) <= max_tokens
    for cut, following in pairwise(cuts):
        assert (len(cut) + 1) * lengths[following[0]] > max_tokens


def test_micro_batches_have_at_most_the_sequences_asked_for() -> None:
    # Sorted lengths 1 2 2 3 9: two by two, of which 2 rows of 3 still fit into 6 tokens, and 9 stands alone.
    batch = batch_of([2, 9, 1, 3, 2])
    assert [index.tolist() for index in batch.micro_batch_indices(6, 2)] == [[2, 0], [4, 3], [1]]
    assert [index.tolist() for index in batch.micro_batch_indices(100, 3)] == [[2, 0, 4], [3, 1]]
    assert [len(index) for index in batch.micro_batch_indices(100, 0)] == [5]
    with pytest.raises(ValueError, match="max_sequences = -1: set at least 1, or 0 for no limit"):
        batch.micro_batch_indices(6, -1)


@given(ragged_lengths, st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_a_limit_of_sequences_holds_beside_that_of_tokens(lengths: list[int], max_tokens: int, most: int) -> None:
    cuts = [index.tolist() for index in batch_of(lengths).micro_batch_indices(max_tokens, most)]
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or (len(cut) <= most and len(cut) * max(lengths[i] for i in cut) <= max_tokens)
    for cut, following in pairwise(cuts):
        assert len(cut) == most or (len(cut) + 1) * lengths[following[0]] > max_tokens


def test_shares_balance_tokens_and_counts() -> None:
    # 9 -> rank 0, 7 -> 1, 6 -> 1 (7 < 9), 5 -> 0: that is 14 and 13 tokens, of two sequences each.
    shares = batch_of([5, 9, 7, 6]).balanced_shares(2)
    assert [share.tolist() for share in shares] == [[0, 1], [2, 3]]


def test_a_very_long_sequence_does_not_unbalance_the_counts() -> None:
    shares = batch_of([100, 1, 1, 1, 1]).balanced_shares(2)
    assert sorted(len(share) for share in shares) == [2, 3]
    assert [len(share) for share in shares if 0 in share.tolist()] == [2]


@given(ragged_lengths, st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_shares_take_every_sequence_once_and_differ_by_one_at_most(lengths: list[int], n: int) -> None:
    shares = [share.tolist() for share in batch_of(lengths).balanced_shares(n)]
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(share == sorted(share) for share in shares)


# --- crossing processes, files ----------------------------------------------------------------------------------


@given(ragged_lengths)
@settings(max_examples=30, deadline=None)
def test_a_batch_survives_pickling(lengths: list[int]) -> None:
    batch = batch_of(lengths)
    assert rows_of(unpickled(pickle.dumps(batch))) == rows_of(batch)


def test_pickling_sends_buffers_out_of_band_and_reads_them_without_a_copy() -> None:
    buffers: list[pickle.PickleBuffer] = []
    batch = batch_of([300, 500])
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == batch.nbytes
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrived = pickle.loads(data, buffers=frozen)
    assert rows_of(arrived) == rows_of(batch)
    addresses = [np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in frozen]
    assert arrived["tokens"].data_ptr() in addresses
    writable = arrived.writable()
    writable["tokens"].fill_(0)
    assert rows_of(arrived) == rows_of(batch)


def test_reading_read_only_memory_leaves_the_warning_filters_as_they_were() -> None:
    before = list(warnings.filters)
    pickle.loads(pickle.dumps(batch_of([2]).only("tokens")))
    assert list(warnings.filters) == before


def test_a_chunk_takes_only_its_own_bytes_along() -> None:
    batch = batch_of([1000] * 100).only("tokens")
    assert len(pickle.dumps(batch.split(100)[7])) < 8 * 1000 + 1000


def test_types_that_numpy_does_not_know_survive_pickling() -> None:
    batch = batch_of([1, 2]).with_tokens(
        bf16=torch.tensor([0.1, -3.0, float("inf")], dtype=torch.bfloat16),
        fp8=torch.tensor([0.5, 1.0, -2.0]).to(torch.float8_e4m3fn),
    )
    arrived = unpickled(pickle.dumps(batch))
    assert arrived["bf16"].dtype == torch.bfloat16
    assert torch.equal(arrived["bf16"], batch["bf16"])
    assert arrived["fp8"].dtype == torch.float8_e4m3fn
    assert arrived["fp8"].float().tolist() == [0.5, 1.0, -2.0]


def test_pickling_drops_the_gradient_graph() -> None:
    batch = Batch([2], {"logprob": torch.ones(2, requires_grad=True) * 2})
    assert not unpickled(pickle.dumps(batch))["logprob"].requires_grad


def test_a_deep_copy_shares_no_memory() -> None:
    batch = batch_of([2])
    copy.deepcopy(batch)["tokens"].fill_(9)
    assert batch["tokens"].tolist() == [0, 1]


def with_everything() -> Batch:
    return batch_of([2, 0, 3]).with_sequences(
        matrix=torch.arange(12).view(3, 2, 2), half=torch.tensor([0.5, 1.0, 1.5], dtype=torch.bfloat16)
    )


def assert_alike(found: Batch, expected: Batch) -> None:
    assert found.names == expected.names
    assert torch.equal(found.lengths, expected.lengths)
    for name in expected.names:
        if isinstance(expected[name], list):
            assert found[name] == expected[name]
        else:
            assert found[name].dtype == expected[name].dtype
            assert torch.equal(found[name], expected[name])


def test_a_table_has_one_row_per_sequence() -> None:
    rows = with_everything().to_table().to_pylist()
    assert [row["lengths"] for row in rows] == [2, 0, 3]
    assert rows[2]["tokens"] == [200, 201, 202]
    assert rows[2]["action_mask"] == [False, True, False]
    assert rows[2]["matrix"] == [8, 9, 10, 11]
    assert rows[2]["half"] == 1.5
    assert rows[2]["label"] == "label 2"


def test_a_batch_survives_the_way_through_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(with_everything().to_table(), tmp_path / "b.parquet")
    assert_alike(Batch.from_table(pyarrow.parquet.read_table(tmp_path / "b.parquet")), with_everything())


def test_part_of_a_table_is_part_of_the_batch() -> None:
    table = with_everything().to_table()
    assert_alike(Batch.from_table(table.slice(1, 2)), with_everything().select([1, 2]))


def test_a_batch_without_token_columns_keeps_its_lengths_in_a_table() -> None:
    assert_alike(Batch.from_table(with_everything().only("reward").to_table()), with_everything().only("reward"))


def test_objects_that_fit_no_table_are_named() -> None:
    with pytest.raises(ValueError, match="objects 'label' fit no table"):
        batch_of([1, 2]).with_objects(label=[1, "a"]).to_table()


def test_a_table_of_somebody_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not made by Batch.to_table; its columns are \['x'\]"):
        Batch.from_table(pyarrow.table({"x": [1]}))

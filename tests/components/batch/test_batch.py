"""Batch: columns, selection, splitting, concatenation, padding and packing."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.batch import Batch
from tests.components.helpers.batches import assert_alike, batch_of, ragged_lengths, rows_of
from tests.messages import says

# --- what is in it ----------------------------------------------------------------------------------------------


def test_offsets_and_sequence_ids_locate_each_token() -> None:
    batch = batch_of([2, 0, 3])
    assert batch.lengths.tolist() == [2, 0, 3]
    assert batch.offsets.tolist() == [0, 2, 2, 5]
    assert batch.sequence_ids.tolist() == [0, 0, 2, 2, 2]
    assert (len(batch), batch.num_tokens) == (3, 5)
    assert batch["tokens"].tolist() == [0, 1, 200, 201, 202]
    assert batch.row(1, "tokens").tolist() == []
    assert batch.row(-1, "tokens").tolist() == [200, 201, 202]
    assert batch.lists("tokens") == [batch.row(i, "tokens").tolist() for i in range(len(batch))]


def test_a_row_is_a_view_of_the_column() -> None:
    batch = batch_of([2, 3])
    assert batch.row(1, "tokens").data_ptr() == batch["tokens"][2:].data_ptr()


def test_columns_of_every_kind_are_read_by_name() -> None:
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


def test_rows_of_integers_floats_and_bools_keep_their_types() -> None:
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
    assert [share.tolist() for share in batch.balanced_shares(2, 0.5)] == [[], []]
    assert [len(part) for part in batch.split(2)] == [0, 0]
    assert batch.packed().cumulative_lengths.tolist() == [0]
    assert batch.packed().max_length == 0
    assert len(Batch.concat([batch, batch]).repeat(3).select([])) == 0


def test_iterating_over_a_batch_is_refused_as_ambiguous() -> None:
    with pytest.raises(TypeError):
        iter(batch_of([1]))  # pyright: ignore[reportArgumentType, reportCallIssue]


# --- wrong input ------------------------------------------------------------------------------------------------


def test_a_column_of_the_wrong_size_is_named_in_the_error() -> None:
    batch = batch_of([1, 2])
    with pytest.raises(ValueError, match=says("'value'", [2], "3 tokens")):
        batch.with_tokens(value=torch.zeros(2))
    with pytest.raises(ValueError, match=says("'score'", [3], "2 sequences")):
        batch.with_sequences(score=torch.zeros(3))
    with pytest.raises(ValueError, match=says("'text'", "1 items", "2 sequences")):
        batch.with_objects(text=["a"])


def test_a_per_token_column_has_one_dimension() -> None:
    with pytest.raises(ValueError, match=says("'value'", [3, 1], "[N]")):
        batch_of([1, 2]).with_tokens(value=torch.zeros(3, 1))


def test_a_column_that_is_not_a_tensor_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=says("'reward'", "list")):
        Batch([1], {"tokens": torch.zeros(1)}, {"reward": [0.5]})  # pyright: ignore[reportArgumentType]


def test_a_name_used_in_two_kinds_of_columns_raises_an_error() -> None:
    with pytest.raises(ValueError, match="'reward'"):
        batch_of([1, 2]).with_tokens(reward=torch.zeros(3))
    with pytest.raises(ValueError, match="'lengths'"):
        batch_of([1, 2]).with_sequences(lengths=torch.zeros(2))


def test_a_column_on_another_device_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=says("'value'", "meta", "cpu", ".to()")):
        batch_of([1]).with_tokens(value=torch.zeros(1, device="meta"))


def test_lengths_are_non_negative_integers() -> None:
    with pytest.raises(ValueError, match=says("lengths[1]", -1)):
        Batch([2, -1], {})
    with pytest.raises(ValueError, match=says("lengths", "[B]")):
        Batch(torch.tensor([1.0]), {})


def test_ragged_rows_of_differing_lengths_are_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=says("row 1 ", "'value'", "1 entries", "'tokens'", 2)):
        Batch.from_rows({"tokens": [[1], [2, 3]], "value": [[0.0], [0.0]]})
    with pytest.raises(ValueError, match=says("'value'", "1 rows", "'tokens'", 2)):
        Batch.from_rows({"tokens": [[1], [2, 3]], "value": [[0.0]]})
    with pytest.raises(ValueError, match="from_rows"):
        Batch.from_rows({})


def test_the_error_for_a_missing_column_lists_the_existing_ones() -> None:
    batch = batch_of([1])
    for attempt in (lambda: batch["value"], lambda: batch.without("value"), lambda: batch.only("value")):
        with pytest.raises(KeyError, match=says("'value'", "tokens", "action_mask", "reward", "label")):
            attempt()
    with pytest.raises(KeyError, match="'value'"):
        batch.padded("value", 0)
    with pytest.raises(ValueError, match=says("'reward'", "tokens", "action_mask")):
        batch.row(0, "reward")


def test_a_position_outside_the_batch_is_refused() -> None:
    batch = batch_of([1, 2])
    with pytest.raises(ValueError, match=r"select.* 2 .* 2$"):
        batch.select([0, 2])
    with pytest.raises(ValueError, match=r"select.* -3 .* 2$"):
        batch.select([-3])
    with pytest.raises(ValueError, match=r"sequence 2 .* 2$"):
        batch.row(2, "tokens")
    with pytest.raises(ValueError, match=says("bool", "3 entries", "2 sequences")):
        batch.select([True, False, True])
    with pytest.raises(ValueError, match="float"):
        batch.select(torch.tensor([0.0]))


@pytest.mark.parametrize("method", ["split", "repeat", "micro_batch_indices", "balanced_shares"])
def test_counts_below_one_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match=says(0, 1)):
        getattr(batch_of([1]), method)(0)


# --- other columns ----------------------------------------------------------------------------------------------


def test_adding_a_column_does_not_change_the_old_batch() -> None:
    old = batch_of([1, 2])
    new = old.with_tokens(value=torch.ones(3), tokens=torch.zeros(3)).with_sequences(reward=torch.ones(2))
    assert "value" not in old
    assert old["tokens"].tolist() == [0, 100, 101]
    assert old["reward"].tolist() == [0.0, 0.5]
    assert new["tokens"].tolist() == [0, 0, 0]
    assert new["reward"].tolist() == [1.0, 1.0]
    assert new.with_objects(label=["a", "b"])["label"] == ["a", "b"]


def test_only_and_without_select_columns_and_keep_the_lengths() -> None:
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


def test_select_accepts_any_order_and_repeated_rows() -> None:
    batch = batch_of([2, 0, 3])
    chosen = batch.select([2, 0, 2, 1, -1])
    assert rows_of(chosen) == [rows_of(batch)[i] for i in (2, 0, 2, 1, 2)]


def test_select_accepts_slices_tensors_and_masks() -> None:
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
def test_select_equals_indexing_row_by_row(lengths: list[int], data: st.DataObject) -> None:
    batch = batch_of(lengths)
    index = data.draw(st.lists(st.integers(-len(lengths), len(lengths) - 1), max_size=8)) if lengths else []
    assert rows_of(batch.select(index)) == [rows_of(batch)[i] for i in index]


def test_split_gives_the_larger_chunks_first() -> None:
    chunks = batch_of([1, 2, 3, 4, 5]).split(3)
    assert [chunk.lengths.tolist() for chunk in chunks] == [[1, 2], [3, 4], [5]]
    assert [len(chunk) for chunk in batch_of([1, 2]).split(3)] == [1, 1, 0]


@given(ragged_lengths, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_sharding_and_unsharding_restore_the_batch(lengths: list[int], n: int) -> None:
    batch = batch_of(lengths)
    parts = batch.__shard__(n)
    assert len(parts) == n
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert rows_of(Batch.__unshard__(parts)) == rows_of(batch)


@given(ragged_lengths, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_parts_of_parts_support_all_operations_of_a_batch(lengths: list[int], n: int) -> None:
    for part in batch_of(lengths).split(n):
        made = Batch(part.lengths.clone(), part.per_token, part.per_sequence, part.objects)
        assert part.num_tokens == made.num_tokens
        assert part.offsets.tolist() == made.offsets.tolist()
        assert part.sequence_ids.tolist() == made.sequence_ids.tolist()
        assert_alike(part.select(slice(None, None, -1)), made.select(slice(None, None, -1)))


def test_chunks_are_views_and_so_are_slices() -> None:
    batch = batch_of([2, 0, 3])
    assert batch.split(3)[2]["tokens"].data_ptr() == batch["tokens"][2:].data_ptr()
    assert batch[2:]["tokens"].data_ptr() == batch["tokens"][2:].data_ptr()


def test_concat_refuses_batches_that_differ() -> None:
    batch = batch_of([1])
    with pytest.raises(ValueError, match=says(0, 1, "per_sequence", ["reward"])):
        Batch.concat([batch, batch.without("reward")])
    with pytest.raises(ValueError, match=says("'tokens'", "torch.int64 [1]", "torch.float32")):
        Batch.concat([batch, batch.with_tokens(tokens=torch.ones(1))])
    with pytest.raises(ValueError, match="'reward'"):
        Batch.concat([batch, batch.with_sequences(reward=torch.ones(1, 2))])
    with pytest.raises(ValueError, match="concat"):
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


# --- sums, padding, packing -------------------------------------------------------------------------------------


def test_tokens_are_summed_within_each_sequence() -> None:
    batch = batch_of([2, 0, 3])
    assert batch.sum_tokens(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])).tolist() == [3.0, 0.0, 28.0]
    assert batch.sum_tokens(torch.tensor([True, False, True, True, True])).tolist() == [1, 0, 3]
    with pytest.raises(ValueError, match=says([3], "5 tokens")):
        batch.sum_tokens(torch.zeros(3))


def test_a_nan_stays_in_its_own_sequence() -> None:
    sums = batch_of([1, 2]).sum_tokens(torch.tensor([float("nan"), 1.0, 2.0]))
    assert sums[1] == 3.0
    assert sums[0].isnan()


def test_padding_is_added_on_the_requested_side() -> None:
    batch = batch_of([2, 0, 3])
    assert batch.padded("tokens", -1).tolist() == [[0, 1, -1], [-1, -1, -1], [200, 201, 202]]
    assert batch.padded("tokens", -1, "left").tolist() == [[-1, 0, 1], [-1, -1, -1], [200, 201, 202]]
    assert batch.padding_mask().tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert batch.padding_mask("left").tolist() == [[False, True, True], [False] * 3, [True] * 3]
    with pytest.raises(ValueError, match=says("side='middle'", "'left'", "'right'")):
        batch.padding_mask("middle")  # pyright: ignore[reportArgumentType]


@given(ragged_lengths, st.sampled_from(["left", "right"]))
@settings(max_examples=60, deadline=None)
def test_unpad_undoes_padded(lengths: list[int], side: Any) -> None:
    batch = batch_of(lengths)
    assert torch.equal(Batch.unpad(batch.padded("tokens", -1, side), batch.lengths, side), batch["tokens"])


def test_unpad_accepts_a_rectangle_that_is_too_wide_and_rejects_one_that_is_too_narrow() -> None:
    lengths = torch.tensor([1, 2])
    wide = torch.arange(8).view(2, 4)
    assert Batch.unpad(wide, lengths).tolist() == [0, 4, 5]
    assert Batch.unpad(wide, lengths, "left").tolist() == [3, 6, 7]
    with pytest.raises(ValueError, match="2 tokens"):
        Batch.unpad(wide[:, :1], lengths)
    with pytest.raises(ValueError, match="2 sequences"):
        Batch.unpad(wide[:1], lengths)


def test_gradients_flow_through_padding_and_back() -> None:
    value_N = torch.ones(5, requires_grad=True)
    batch = batch_of([2, 0, 3]).with_tokens(value=value_N)
    (Batch.unpad(batch.padded("value", 0.0), batch.lengths) * torch.arange(5)).sum().backward()
    assert value_N.grad is not None
    assert value_N.grad.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_packed_positions_restart_at_each_sequence() -> None:
    packed = batch_of([2, 0, 3]).packed()
    assert packed.tokens.tolist() == [0, 1, 200, 201, 202]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2]
    assert packed.cumulative_lengths.tolist() == [0, 2, 2, 5]
    assert packed.max_length == 3
    assert type(packed.max_length) is int
    assert (packed.positions.dtype, packed.cumulative_lengths.dtype) == (torch.int64, torch.int32)
    assert batch_of([1, 1]).packed("action_mask").tokens.tolist() == [False, True]


def test_a_batch_with_more_tokens_than_int32_cannot_be_packed() -> None:
    # A tensor with one stored number that is expanded to 2**31 elements.
    batch = Batch([2**31], {"tokens": torch.zeros(1, dtype=torch.int8).expand(2**31)})
    with pytest.raises(ValueError, match="2147483648 tokens"):
        batch.packed()
    with pytest.raises(ValueError, match="'reward'"):
        batch_of([1]).packed("reward")


@given(st.lists(st.integers(0, 40), max_size=12))
@settings(max_examples=80, deadline=None)
def test_packed_output_is_split_into_its_sequences(lengths: list[int]) -> None:
    batch = batch_of(lengths)
    packed = batch.packed()
    assert packed.positions.tolist() == [t for length in lengths for t in range(length)]
    assert packed.max_length == max(lengths, default=0)
    again = Batch(packed.cumulative_lengths.diff(), {"tokens": packed.tokens})
    assert_alike(again, batch.only("tokens"))


def test_a_logged_column_missing_in_one_batch_is_nan_after_concat() -> None:
    plain = Batch.from_rows({"tokens": [[1], [2, 3]]})
    whole = Batch.concat([plain.with_sequences(log_a=torch.ones(2)), plain])
    assert whole["log_a"].nan_to_num(-1).tolist() == [1, 1, -1, -1]
    with pytest.raises(ValueError, match=r"\['reward'\]"):
        Batch.concat([plain.with_sequences(reward=torch.ones(2)), plain])


def test_a_batch_on_a_device_keeps_the_batch_that_was_sent() -> None:
    batch = Batch([2, 1], {"tokens": torch.tensor([3, 4, 5])})
    assert batch.host is batch
    sent = batch.to("meta")
    assert sent["tokens"].is_meta
    assert sent.host is batch
    # Other columns would not be those of the batch that was sent.
    with pytest.raises(NotImplementedError):
        _ = sent.with_tokens(tokens=torch.zeros(3, device="meta")).host

"""Batch: pickling, Arrow tables and Parquet files."""

import copy
import datetime
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.batch import Batch
from components.batch.reading import batch_from_table, load_batch
from tests.components.helpers.batches import assert_alike, batch_of, ragged_lengths, rows_of, with_everything
from tests.messages import says

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)

numbers = st.floats(width=16) | st.sampled_from([0.0, -0.0, 1.0])
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


def unpickled(data: bytes) -> Batch:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pickle.loads(data)


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


# --- pickles ----------------------------------------------------------------------------------------------------


@given(ragged_lengths)
@settings(max_examples=60, deadline=None)
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


def test_reading_read_only_memory_does_not_change_the_warning_filters() -> None:
    before = list(warnings.filters)
    pickle.loads(pickle.dumps(batch_of([2]).only("tokens")))
    assert list(warnings.filters) == before


def test_a_chunk_pickles_only_its_own_bytes() -> None:
    batch = batch_of([1000] * 100).only("tokens")
    assert len(pickle.dumps(batch.split(100)[7])) < 8 * 1000 + 1000


def test_dtypes_without_a_numpy_equivalent_survive_pickling() -> None:
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


@given(batches())
@settings(max_examples=60, deadline=None)
def test_a_batch_of_any_columns_survives_pickling(batch: Batch) -> None:
    assert_alike(unpickled(pickle.dumps(batch)), batch)


# --- tables -----------------------------------------------------------------------------------------------------


def test_a_table_has_one_row_per_sequence() -> None:
    rows = with_everything().to_table().to_pylist()
    assert [row["lengths"] for row in rows] == [2, 0, 3]
    assert rows[2]["tokens"] == [200, 201, 202]
    assert rows[2]["action_mask"] == [False, True, False]
    assert rows[2]["matrix"] == [8, 9, 10, 11]
    assert rows[2]["half"] == 1.5
    assert rows[2]["label"] == "label 2"


def test_a_batch_survives_a_parquet_round_trip(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(with_everything().to_table(), tmp_path / "b.parquet")
    assert_alike(batch_from_table(pyarrow.parquet.read_table(tmp_path / "b.parquet")), with_everything())


def test_a_slice_of_a_table_is_a_slice_of_the_batch() -> None:
    table = with_everything().to_table()
    assert_alike(batch_from_table(table.slice(1, 2)), with_everything().select([1, 2]))


def test_a_batch_without_token_columns_keeps_its_lengths_in_a_table() -> None:
    assert_alike(batch_from_table(with_everything().only("reward").to_table()), with_everything().only("reward"))


class Own:
    """A class that an Arrow table cannot store."""


@pytest.mark.parametrize(
    "column", [[(1, 2), None], [Own(), "a"], [{1: "a"}, None], [{"a": {1}}, None], [np.float32(1)] * 2]
)
def test_objects_that_a_table_cannot_restore_are_refused_by_name(column: list[Any]) -> None:
    with pytest.raises(ValueError, match="'label'"):
        batch_of([1, 2]).with_objects(label=column).to_table()


def test_a_dtype_that_a_table_cannot_store_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=says("'phase'", "torch.complex64")):
        batch_of([1]).with_tokens(phase=torch.zeros(1, dtype=torch.complex64)).to_table()


def test_a_table_of_another_program_raises_an_error() -> None:
    with pytest.raises(ValueError, match=says("Batch.to_table", ["x"])):
        batch_from_table(pyarrow.table({"x": [1]}))


# --- files ------------------------------------------------------------------------------------------------------


@given(batch=batches())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_loaded_batch_equals_the_saved_one(batch: Batch, tmp_path: Path) -> None:
    batch.save(tmp_path / "b.parquet")
    assert_alike(load_batch(tmp_path / "b.parquet"), batch)
    assert [path.name for path in tmp_path.iterdir()] == ["b.parquet"]


@pytest.mark.parametrize(
    "column",
    [
        ["a", None, "é"],
        [None, None, None],
        [{"a": 1}, {"b": [2.5, None]}, None],
        [{}, {}, {"deep": {}}],
        [["x"], [], None],
        [1, 2.0, True],
        [2**70, -1, None],
        [float("nan"), None, -0.0],
        [b"\xff", b"", None],
        ["half a pair \ud800", "", None],
        [datetime.date(2024, 2, 29), None, None],
    ],
)
def test_saved_objects_are_restored_unchanged(column: list[Any], tmp_path: Path) -> None:
    batch = batch_of([2, 0, 3]).with_objects(extra=column)
    batch.save(tmp_path / "b.parquet")
    assert_alike(load_batch(tmp_path / "b.parquet"), batch)


def test_a_data_frame_has_one_row_per_sequence(tmp_path: Path) -> None:
    batch = with_everything().with_objects(turns=[{"role": "user"}, None, {"tool": "à"}])
    batch.save(tmp_path / "b.parquet")
    frame = pandas.read_parquet(tmp_path / "b.parquet")
    assert list(frame.columns) == ["lengths", *batch.names]
    assert frame["lengths"].tolist() == [2, 0, 3]
    assert [row.tolist() for row in frame["tokens"]] == [[0, 1], [], [200, 201, 202]]
    assert frame["reward"].tolist() == [0.0, 0.5, 1.0]
    assert frame["half"].tolist() == [0.5, 1.0, 1.5]
    assert frame["matrix"].tolist()[2].tolist() == [8, 9, 10, 11]
    assert frame["label"].tolist() == ["label 0", "label 1", "label 2"]
    assert frame["turns"].tolist()[2] == '{"tool": "à"}'


def test_a_missing_folder_is_created_and_an_existing_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step=1" / "b.parquet"
    batch_of([1]).save(str(path))
    batch_of([2, 3]).save(path)
    assert_alike(load_batch(str(path)), batch_of([2, 3]))


def test_a_failed_write_leaves_no_partial_file_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    batch_of([1]).save(path)
    with pytest.raises(ValueError, match="'label'"):
        batch_of([1]).with_objects(label=[Own()]).save(path)
    assert_alike(load_batch(path), batch_of([1]))
    # A folder at the path of the file makes the last step of writing fail, even for root.
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        batch_of([1]).save(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.parquet", "folder"]


def test_a_file_without_a_batch_raises_an_error_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    path.write_text("tokens")
    with pytest.raises(ValueError, match=says("b.parquet", "Parquet")):
        load_batch(path)
    batch_of([100] * 9).save(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-20], whole[:8] + b"x" * 40 + whole[48:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=says(path)):
            load_batch(path)
    pandas.DataFrame({"tokens": [[1, 2]]}).to_parquet(path)
    with pytest.raises(ValueError, match=says("b.parquet", "Batch.to_table")):
        load_batch(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.parquet"):
        load_batch(tmp_path / "missing.parquet")

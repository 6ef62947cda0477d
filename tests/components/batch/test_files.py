"""Batch: pickling, and writing of Arrow tables and Parquet files."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings

from components.batch import Batch
from components.batch.reading import load_batch
from tests.components.helpers.batches import assert_alike, batch_of, batches, ragged_lengths, rows_of, with_everything
from tests.messages import says


def unpickled(data: bytes) -> Batch:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pickle.loads(data)


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


# --- files ------------------------------------------------------------------------------------------------------


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

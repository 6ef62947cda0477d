"""Reading of stored batches: Arrow tables and Parquet files."""

import datetime
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings

from components.batch import Batch
from components.batch.reading import batch_from_table, load_batch
from tests.components.helpers.batches import assert_alike, batch_of, batches, with_everything
from tests.messages import says


def test_a_batch_survives_a_parquet_round_trip(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(with_everything().to_table(), tmp_path / "b.parquet")
    assert_alike(batch_from_table(pyarrow.parquet.read_table(tmp_path / "b.parquet")), with_everything())


def test_a_slice_of_a_table_is_a_slice_of_the_batch() -> None:
    table = with_everything().to_table()
    assert_alike(batch_from_table(table.slice(1, 2)), with_everything().select([1, 2]))


def test_a_batch_without_token_columns_keeps_its_lengths_in_a_table() -> None:
    assert_alike(batch_from_table(with_everything().only("reward").to_table()), with_everything().only("reward"))


def test_a_table_of_another_program_raises_an_error() -> None:
    with pytest.raises(ValueError, match=says("Batch.to_table", ["x"])):
        batch_from_table(pyarrow.table({"x": [1]}))


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

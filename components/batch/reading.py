"""Reading of stored batches: Parquet files of `Batch.save`, and tables of `Batch.to_table`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.batch.batch import Batch
from components.batch.files import TABLE_KEY, from_json, from_numpy


def load_batch(path: str | Path) -> Batch:
    """Load a batch that `Batch.save` wrote, exactly as it was, on the CPU. Its tensors may be read-only.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file was not written by `save`, or is incomplete.
    """
    try:
        return batch_from_table(_read(Path(path)))
    except ValueError as error:
        raise ValueError(f"{path} holds no batch: {error}") from error


def batch_from_table(table: Any) -> Batch:
    """Return the batch of a table from `Batch.to_table`, directly or read from Parquet. Tensors may be read-only.

    Raises:
        ValueError: the table was not written by `to_table`.
    """
    lengths_B, columns = _columns_of(table)
    return Batch(lengths_B, **columns)


def _columns_of(table: Any) -> tuple[Tensor, Mapping[str, dict[str, Any]]]:
    """Return the lengths [B], and the columns by kind."""
    # The kinds and dtypes of columns are in the metadata, because Arrow has no bfloat16 and no per-token columns.
    written = (table.schema.metadata or {}).get(TABLE_KEY)
    if written is None:
        raise ValueError(f"this table was not made by Batch.to_table; its columns are {table.column_names}")
    kinds: dict[str, dict[str, Any]] = {"per_token": {}, "per_sequence": {}, "objects": {}}
    for name, (kind, dtype, tail) in json.loads(written).items():
        column = table.column(name)
        if kind == "objects":
            items = column.to_pylist()
            if dtype == "json":
                items = from_json(items)
            kinds[kind][name] = items
            continue
        torch_dtype = getattr(torch, dtype)
        if tail:
            kinds[kind][name] = torch.tensor(column.to_pylist(), dtype=torch_dtype).reshape(len(column), *tail)
            continue
        values = column.combine_chunks()
        if kind == "per_token":
            values = values.flatten()
        kinds[kind][name] = _from_arrow(values).to(torch_dtype)
    return _from_arrow(table.column("lengths").combine_chunks()), kinds


def _from_arrow(values: Any) -> Tensor:
    array = values.to_numpy(zero_copy_only=False)
    return from_numpy(array, str(array.dtype))


def _read(path: Path) -> Any:
    """Read the table of one Parquet file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not a Parquet file, or is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet

    with pa.OSFile(str(path)) as file:
        try:
            # read_table would add a column for a folder name such as step=3.
            return pyarrow.parquet.ParquetFile(file).read()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"the file is not a complete Parquet file ({error})") from error

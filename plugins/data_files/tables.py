"""Rows of tables: CSV, Parquet and Arrow files, and record batches of Arrow."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from components.data.cells import without_nulls
from components.data.readers import file_type
from components.data.unpacking import read_bytes
from components.net.hub import first_line
from plugins.data_files.unpacking import ipc_batches, parquet_batches


def read_table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV, Parquet or Arrow file.

    Raises:
        ValueError: it cannot be read.
    """
    # Imported here, as most runs read no table and pyarrow would delay every error message at start-up.
    import pyarrow

    batches = {".parquet": parquet_batches, ".csv": _csv_batches}.get(file_type(path), ipc_batches)
    try:
        return rows_of(batches(path))
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"data file {str(path)!r} cannot be read ({first_line(error)}); mend or replace it") from error


def _csv_batches(path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.csv

    content = read_bytes(path)
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    # The file is one block: pyarrow cannot read a row that spans three blocks or more, and prompts can be long.
    read = pyarrow.csv.ReadOptions(block_size=min(max(len(content), 2**20), 2**31 - 1))
    # All cells are text: a label such as 0.50, 007 or a date is compared with the text that the model writes.
    # UTF-8 is checked later, where the error can name the row.
    convert = pyarrow.csv.ConvertOptions(default_column_type=pyarrow.string(), check_utf8=False)
    return pyarrow.csv.read_csv(pyarrow.BufferReader(content), read, parse, convert).to_batches()


def rows_of(batches: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the rows of Arrow record batches as dicts, without null fields at any depth.

    In a table every struct has the fields of all structs of its column: a tool call with a `city` gets the `zone` of
    another call as a null.

    Raises:
        ValueError: two columns have the same name, or a cell cannot be converted to Python. The message names the row
            and the column.
    """
    import pyarrow

    rows: list[dict[str, Any]] = []
    for batch in batches:
        names = batch.schema.names
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"there are several columns {repeated[0]!r}; rename all but one")
        maps: Any = None
        if "map<" in str(batch.schema):  # only then, because it takes three times as long
            maps = "strict"
        try:
            records = _shortest_floats(batch).to_pylist(maps_as_pydicts=maps)
        except (pyarrow.ArrowException, ValueError, OverflowError, KeyError) as error:
            raise _bad_cell(batch, len(rows), error) from error
        # A reader per column costs time for every cell, and only `datasets` writes this type.
        if "arrow.json" in str(batch.schema):
            readers = {field.name: _json_reader(field.type) for field in batch.schema}
            records = [{name: readers[name](cell) for name, cell in record.items()} for record in records]
        rows += map(without_nulls, records)
    return rows


def _shortest_floats(batch: Any) -> Any:
    """Convert float32 columns to the float64 with the shortest text: 0.1 instead of 0.10000000149011612."""
    import pyarrow

    for index, field in enumerate(batch.schema):
        if pyarrow.types.is_float32(field.type) or pyarrow.types.is_float16(field.type):
            # Through text: Arrow prints the shortest text that identifies the float32.
            float64_column = batch.column(index).cast(pyarrow.string()).cast(pyarrow.float64())
            batch = batch.set_column(index, field.name, float64_column)
    return batch


def _bad_cell(batch: Any, start: int, error: Exception) -> ValueError:
    """Return the error for the first cell that cannot be converted to Python, such as half of a surrogate pair."""
    import pyarrow

    for name, column in zip(batch.schema.names, batch.columns):
        for number, cell in enumerate(column, start):
            try:
                cell.as_py(maps_as_pydicts="strict")
            except (pyarrow.ArrowException, ValueError, OverflowError, KeyError) as reason:
                return ValueError(f"row {number}, column {name!r}: {reason}")
    return ValueError(str(error))


def _json_reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that decodes the JSON texts in values of an Arrow type.

    `datasets` stores values of mixed types as JSON text.
    """
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return _read_json
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        read_item = _json_reader(kind.value_type)
        return lambda items: items and [read_item(item) for item in items]
    if pyarrow.types.is_struct(kind):
        return partial(_read_fields, {field.name: _json_reader(field.type) for field in kind})
    return lambda value: value


def _read_json(text: str | None) -> Any:
    if text is None:
        return None
    return json.loads(text)


def _read_fields(readers: Mapping[str, Callable[[Any], Any]], value: Mapping[str, Any] | None) -> Any:
    if value is None:
        return None
    return {name: readers[name](field) for name, field in value.items()}

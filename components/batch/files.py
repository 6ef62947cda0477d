"""How a batch leaves the memory of its process: as numpy arrays in a pickle, as rows of a table, as a Parquet file.

B sequences; N all tokens of a batch end to end. pyarrow is imported only where a table is made or read.
"""

import contextlib
import json
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TABLE_KEY = b"troupe.batch"
# numpy has no such numbers; their bits travel in integers of the same width.
_CARRIERS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def to_numpy(x: Tensor) -> tuple[np.ndarray, str]:
    """The numbers, without a copy where they are on the CPU, and the torch dtype to see them as."""
    x = x.detach().cpu()
    return x.view(_CARRIERS.get(x.dtype, x.dtype)).numpy(), str(x.dtype).removeprefix("torch.")


def from_numpy(array: np.ndarray, dtype: str) -> Tensor:
    """The tensor that `to_numpy` took apart, without a copy; read-only memory stays read-only."""
    if array.flags.writeable:
        return torch.from_numpy(array).view(getattr(torch, dtype))
    with warnings.catch_warnings():
        # Read-only is what a batch from another process is meant to be, and Batch says so.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(array).view(getattr(torch, dtype))


def to_table(
    lengths: Tensor,
    offsets: Tensor,
    per_token: Mapping[str, Tensor],
    per_sequence: Mapping[str, Tensor],
    objects: Mapping[str, Sequence[Any]],
) -> Any:
    """See `Batch.to_table`."""
    import pyarrow as pa

    arrays: dict[str, Any] = {"lengths": pa.array(to_numpy(lengths)[0])}
    described: dict[str, tuple[str, str, list[int]]] = {}
    ends = pa.array(to_numpy(offsets)[0])
    for name, x_N in per_token.items():
        values, dtype = _to_arrow(name, x_N)
        described[name] = ("per_token", dtype, [])
        arrays[name] = pa.LargeListArray.from_arrays(ends, values)
    for name, x_B in per_sequence.items():
        values, dtype = _to_arrow(name, x_B.reshape(-1))
        described[name] = ("per_sequence", dtype, list(x_B.shape[1:]))
        arrays[name] = values if x_B.dim() == 1 else pa.array(x_B.flatten(1).tolist())
    for name, column in objects.items():
        arrays[name], encoding = _objects_to_arrow(name, column)
        described[name] = ("objects", encoding, [])
    return pa.table(arrays).replace_schema_metadata({_TABLE_KEY: json.dumps(described).encode()})


def _to_arrow(name: str, x: Tensor) -> tuple[Any, str]:
    import pyarrow as pa

    readable = x.float() if x.dtype in _CARRIERS else x
    try:
        return pa.array(to_numpy(readable)[0]), str(x.dtype).removeprefix("torch.")
    except pa.ArrowException as error:
        raise ValueError(f"column {name!r}, {x.dtype}, fits no table ({error}); drop it with .without()") from error


def _objects_to_arrow(name: str, column: Sequence[Any]) -> tuple[Any, str]:
    """An Arrow array and how it holds the objects: "" as what they are, "json" as text.

    What has parts becomes text, and so does what differs in kind from row to row: Arrow would give all dicts the same
    keys and make floats of whole numbers, and a column would change its type from one file to the next.
    """
    import pyarrow as pa

    kinds = {type(item) for item in column} - {type(None)}
    with contextlib.suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
        array = pa.array(column)
        if not pa.types.is_nested(array.type) and (kinds <= {str} or _same(array.to_pylist(), column)):
            return array, ""
    # Readable letters, unless there is half a surrogate pair, which Arrow refuses.
    for escaped in (False, True):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            texts = [None if item is None else json.dumps(item, ensure_ascii=escaped) for item in column]
            if _same(_from_json(texts), column):
                return pa.array(texts, pa.string()), "json"
    found = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ValueError(
        f"objects {name!r} fit no table: these ({found}) would not come back as they are; make them text, numbers, or "
        "lists and dicts of those, or drop them with .without()"
    )


def _same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    # Their text tells 1 from 1.0 and from True, and a list from a tuple, where == does not; NaN is NaN.
    return repr(found) == repr(list(expected))


def _from_json(texts: Sequence[str | None]) -> list[Any]:
    return [None if text is None else json.loads(text) for text in texts]


def from_table(table: Any) -> tuple[Tensor, Mapping[str, dict[str, Any]]]:
    """Lengths [B], and the columns by kind; see `Batch.from_table`."""
    written = (table.schema.metadata or {}).get(_TABLE_KEY)
    if written is None:
        raise ValueError(f"this table was not made by Batch.to_table; its columns are {table.column_names}")
    kinds: dict[str, dict[str, Any]] = {"per_token": {}, "per_sequence": {}, "objects": {}}
    for name, (kind, dtype, tail) in json.loads(written).items():
        column = table.column(name)
        if kind == "objects":
            items = column.to_pylist()
            kinds[kind][name] = _from_json(items) if dtype == "json" else items
            continue
        torch_dtype = getattr(torch, dtype)
        if tail:
            kinds[kind][name] = torch.tensor(column.to_pylist(), dtype=torch_dtype).reshape(len(column), *tail)
            continue
        values = column.combine_chunks()
        kinds[kind][name] = _from_arrow(values.flatten() if kind == "per_token" else values).to(torch_dtype)
    return _from_arrow(table.column("lengths").combine_chunks()), kinds


def _from_arrow(values: Any) -> Tensor:
    array = values.to_numpy(zero_copy_only=False)
    return from_numpy(array, str(array.dtype))


def write(table: Any, path: Path) -> None:
    """Write a table to a Parquet file, which has its name only when it is whole."""
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, so that two who write the same file do not write into each other's.
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        pyarrow.parquet.write_table(table, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read(path: Path) -> Any:
    """The table of one Parquet file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no Parquet file, or is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet

    with pa.OSFile(str(path)) as file:
        try:
            # Not read_table, which takes names of folders such as step=3 for columns.
            return pyarrow.parquet.ParquetFile(file).read()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"no whole Parquet file ({error})") from error

"""Serialisation of a batch: numpy arrays for pickle, Arrow tables, and Parquet files.

Shape suffixes: B sequences; N all tokens of a batch end to end. pyarrow is imported inside the functions that need it,
because importing it takes longer than most callers run.
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

TABLE_KEY = b"troupe.batch"
# numpy lacks these dtypes. Their bits are stored in integers of the same width.
_BIT_DTYPES = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def to_numpy(x: Tensor) -> tuple[np.ndarray, str]:
    """Return the values as an array, without a copy if they are on the CPU, and the name of the torch dtype."""
    x = x.detach().cpu()
    return x.view(_BIT_DTYPES.get(x.dtype, x.dtype)).numpy(), str(x.dtype).removeprefix("torch.")


def from_numpy(array: np.ndarray, dtype: str) -> Tensor:
    """Return the tensor of an array and dtype from `to_numpy`, without a copy. Read-only memory stays read-only."""
    if array.flags.writeable:
        return torch.from_numpy(array).view(getattr(torch, dtype))
    with warnings.catch_warnings():
        # A batch from another process is read-only on purpose, as the docstring of Batch states.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(array).view(getattr(torch, dtype))


def to_table(
    lengths: Tensor,
    offsets: Tensor,
    per_token: Mapping[str, Tensor],
    per_sequence: Mapping[str, Tensor],
    objects: Mapping[str, Sequence[Any]],
) -> Any:
    """Return a pyarrow table; see `Batch.to_table`."""
    import pyarrow as pa

    arrays: dict[str, Any] = {"lengths": pa.array(to_numpy(lengths)[0])}
    described: dict[str, tuple[str, str, list[int]]] = {}
    # int64 offsets, as LargeListArray needs them: a column may have more than 2**31 tokens.
    ends = pa.array(to_numpy(offsets)[0])
    for name, x_N in per_token.items():
        values, dtype = _to_arrow(name, x_N)
        described[name] = ("per_token", dtype, [])
        arrays[name] = pa.LargeListArray.from_arrays(ends, values)
    for name, x_B in per_sequence.items():
        values, dtype = _to_arrow(name, x_B.reshape(-1))
        described[name] = ("per_sequence", dtype, list(x_B.shape[1:]))
        if x_B.dim() > 1:
            values = pa.array(x_B.flatten(1).tolist())
        arrays[name] = values
    for name, column in objects.items():
        arrays[name], encoding = _objects_to_arrow(name, column)
        described[name] = ("objects", encoding, [])
    return pa.table(arrays).replace_schema_metadata({TABLE_KEY: json.dumps(described).encode()})


def _to_arrow(name: str, x: Tensor) -> tuple[Any, str]:
    import pyarrow as pa

    dtype = str(x.dtype).removeprefix("torch.")
    if x.dtype in _BIT_DTYPES:
        # As numbers, which other programs can read, instead of the bits in integers.
        x = x.float()
    try:
        return pa.array(to_numpy(x)[0]), dtype
    except pa.ArrowException as error:
        raise ValueError(f"column {name!r} of {x.dtype} fits no table ({error}); drop it with .without()") from error


def _objects_to_arrow(name: str, column: Sequence[Any]) -> tuple[Any, str]:
    """Return an Arrow array of the objects and its encoding: "" for plain values, "json" for JSON text.

    Nested values and columns of mixed types become JSON text. Otherwise Arrow would give all dicts the same keys and
    convert integers to floats, and the type of a column would vary from file to file.
    """
    import pyarrow as pa

    kinds = {type(item) for item in column} - {type(None)}
    with contextlib.suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
        array = pa.array(column)
        if not pa.types.is_nested(array.type) and (kinds <= {str} or _is_same(array.to_pylist(), column)):
            return array, ""
    # First with readable letters. Half of a surrogate pair, which Arrow rejects, needs the escaped form.
    for escaped in (False, True):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            texts = [None if item is None else json.dumps(item, ensure_ascii=escaped) for item in column]
            if _is_same(from_json(texts), column):
                return pa.array(texts, pa.string()), "json"
    type_names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ValueError(
        f"objects {name!r} fit no table: their types ({type_names}) cannot be restored exactly; make them text, "
        "numbers, or lists and dicts of those, or drop them with .without()"
    )


def _is_same(restored: Sequence[Any], original: Sequence[Any]) -> bool:
    # repr distinguishes 1 from 1.0 and from True, and a list from a tuple; == does not. The repr of NaN equals itself.
    return repr(restored) == repr(list(original))


def from_json(texts: Sequence[str | None]) -> list[Any]:
    return [None if text is None else json.loads(text) for text in texts]


def write(table: Any, path: Path) -> None:
    """Write a table to a Parquet file, which gets its name when it is complete."""
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    # A unique temporary name, so that two writers of the same file do not write into each other's temporary file.
    partial_path = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        pyarrow.parquet.write_table(table, partial_path)
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)

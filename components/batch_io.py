"""How a batch leaves the memory of its process: as numpy arrays in a pickle, as rows of a table.

B sequences; N all tokens of a batch end to end. pyarrow is imported only where a table is made.
"""

import json
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from components.batch import Batch

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


def to_table(batch: "Batch") -> Any:
    """See `Batch.to_table`."""
    import pyarrow as pa

    arrays: dict[str, Any] = {"lengths": pa.array(to_numpy(batch.lengths)[0])}
    described: dict[str, tuple[str, str, list[int]]] = {}
    offsets = pa.array(to_numpy(batch.offsets)[0])
    for name, x_N in batch.per_token.items():
        values, dtype = _to_arrow(x_N)
        described[name] = ("per_token", dtype, [])
        arrays[name] = pa.LargeListArray.from_arrays(offsets, values)
    for name, x_B in batch.per_sequence.items():
        values, dtype = _to_arrow(x_B.reshape(-1))
        described[name] = ("per_sequence", dtype, list(x_B.shape[1:]))
        arrays[name] = values
        if x_B.dim() > 1:
            arrays[name] = pa.FixedSizeListArray.from_arrays(values, math.prod(x_B.shape[1:]))
    for name, column in batch.objects.items():
        described[name] = ("objects", "", [])
        try:
            arrays[name] = pa.array(column)
        except pa.ArrowException as error:
            raise ValueError(f"objects {name!r} fit no table ({error}); drop them with .without()") from error
    return pa.table(arrays).replace_schema_metadata({_TABLE_KEY: json.dumps(described).encode()})


def _to_arrow(x: Tensor) -> tuple[Any, str]:
    import pyarrow as pa

    readable = x.float() if x.dtype in _CARRIERS else x
    return pa.array(to_numpy(readable)[0]), str(x.dtype).removeprefix("torch.")


def from_table(table: Any) -> tuple[Tensor, Mapping[str, dict[str, Any]]]:
    """Lengths [B], and the columns by kind; see `Batch.from_table`."""
    written = (table.schema.metadata or {}).get(_TABLE_KEY)
    if written is None:
        raise ValueError(f"this table was not made by Batch.to_table; its columns are {table.column_names}")
    kinds: dict[str, dict[str, Any]] = {"per_token": {}, "per_sequence": {}, "objects": {}}
    for name, (kind, dtype, tail) in json.loads(written).items():
        column = table.column(name).combine_chunks()
        if kind == "objects":
            kinds[kind][name] = column.to_pylist()
            continue
        values = column.flatten() if kind == "per_token" or tail else column
        x = _from_arrow(values).to(getattr(torch, dtype))
        kinds[kind][name] = x.reshape(len(column), *tail) if tail else x
    return _from_arrow(table.column("lengths").combine_chunks()), kinds


def _from_arrow(values: Any) -> Tensor:
    array = values.to_numpy(zero_copy_only=False)
    return from_numpy(array, str(array.dtype))

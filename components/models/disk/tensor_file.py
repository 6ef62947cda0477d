"""Reading and writing of safetensors files, one tensor or a part of one at a time, in any order.

A file consists of a header with the dtype, shape and position of each tensor, and the bytes of the tensors. Files are
not mapped into memory, because touched pages would remain in memory, and only the requested part of a tensor is read.
The safetensors library can do one or the other, but not both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES as _DTYPES
from torch import Tensor

from components.models.disk.blocks import Block
from components.models.disk.tensor_header import check_data, read_header

_TYPES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorReader:
    """Reader of a safetensors file."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: the file cannot be opened.
            ValueError: the file is incomplete, or has a dtype that torch does not support.
        """
        self._file = os.open(path, os.O_RDONLY)
        try:
            self._tensors = self._read_header(os.fstat(self._file).st_size)
        except ValueError:
            # The object is not returned to a caller that could close the file.
            self.close()
            raise

    def _read_header(self, size: int) -> dict[str, tuple[torch.Size, torch.dtype, int]]:
        start, entries = read_header(self._file)
        check_data(entries, start, size)
        unknown = sorted({entry["dtype"] for entry in entries.values()} - set(_DTYPES))
        if unknown:
            raise ValueError(f"it has numbers of the type {unknown[0]}")
        return {
            name: (torch.Size(entry["shape"]), _DTYPES[entry["dtype"]], start + entry["data_offsets"][0])
            for name, entry in entries.items()
        }

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def empty(self, name: str) -> Tensor:
        """Return the shape and dtype of a tensor, as a meta tensor."""
        shape, dtype, _ = self._tensors[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole tensor."""
        shape = self._tensors[name][0]
        return self.numbers(name, 0, shape.numel()).view(shape)

    def block(self, name: str, block: Block) -> Tensor:
        """Read a block of a tensor, [rows * columns]."""
        if block.is_stretch:
            return self.numbers(name, block.row * block.width, block.numbers)
        starts = range(block.row * block.width + block.column, (block.row + block.rows) * block.width, block.width)
        rows = [self.numbers(name, start, block.columns) for start in starts]
        return torch.cat(rows or [self.numbers(name, 0, 0)])

    def numbers(self, name: str, start: int, count: int) -> Tensor:
        """Read `count` elements of a flattened tensor from element `start` on, [count]."""
        _, dtype, offset = self._tensors[name]
        numbers = torch.empty(count, dtype=dtype)
        left = numbers.view(torch.uint8).numpy().data
        offset += start * dtype.itemsize
        while left:
            read = os.preadv(self._file, [left], offset)
            if not read:
                raise ValueError(f"it was cut short while {name} was read")
            left, offset = left[read:], offset + read
        return numbers

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class TensorFile:
    """Writer of a safetensors file. Use it as a context manager, or close it after the last tensor."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """
        Args:
            path: path to the file, which is replaced.
            tensors: shapes and dtypes of the tensors by name. Meta tensors suffice.
        """
        self._shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self._left = {name: tensor.numel() for name, tensor in tensors.items()}
        header, self._offsets = _header(tensors)
        # A new file: the old one may be mapped by a reader, whose weights would change.
        path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        write_at(self._file, torch.frombuffer(bytearray(header), dtype=torch.uint8), 0)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        # After an error the tensors are missing for that reason, which this one would hide.
        missing = [name for name, count in self._left.items() if count]
        assert kind is not None or not missing, f"{len(missing)} tensors never came whole, {missing[0]} among them"

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor."""
        assert (tensor.shape, tensor.dtype) == self._shapes[name], f"{name} is {tensor.dtype} {list(tensor.shape)}"
        self.write_part(name, tensor, 0)

    def write_part(self, name: str, part: Tensor, start: int) -> None:
        """Write a part of a flattened tensor from element `start` on."""
        write_at(self._file, part, self._offsets[name] + start * part.itemsize)
        self._left[name] -= part.numel()

    def close(self) -> None:
        """Close the file, complete or not."""
        os.close(self._file)


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file as bytes, and the offset of each tensor in the file."""
    offsets: dict[str, int] = {}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The order is that of the safetensors library: larger dtypes come first, so that all tensors are aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        tensor = tensors[name]
        offsets[name] = end
        end += tensor.numel() * tensor.dtype.itemsize
        place = {"shape": list(tensor.shape), "data_offsets": [offsets[name], end]}
        entries[name] = {"dtype": _TYPES[tensor.dtype], **place}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The format allows padding with spaces, which aligns the tensors to 8 bytes.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def write_at(file: int, tensor: Tensor, offset: int) -> None:
    """Write the elements of a tensor into an open file at an offset in bytes.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    if not tensor.numel():
        return
    left = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    while left:
        # Linux writes at most 2 GiB per call, and fewer bytes if the disk fills up.
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written

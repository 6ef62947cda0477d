"""Safetensors files whose tensors are read and written one at a time, or a part of one at a time, in any order.

A file is a header, which says of each tensor its type, its shape and where its bytes lie, and then the bytes. Nothing
is mapped into memory, where pages that were touched would stay, and of a tensor only the part that is wanted is read:
safetensors itself does either the one or the other.
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
    """A file that is being read."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: it cannot be opened.
            ValueError: it is not whole, or has a type of numbers that torch does not compute with.
        """
        self._file = os.open(path, os.O_RDONLY)
        try:
            self._tensors = self._read_header(os.fstat(self._file).st_size)
        except ValueError:
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
        """Shape and type of a tensor, on the meta device."""
        shape, dtype, _ = self._tensors[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        shape = self._tensors[name][0]
        return self.numbers(name, 0, shape.numel()).view(shape)

    def block(self, name: str, block: Block) -> Tensor:
        """[rows * columns] a part of a tensor."""
        if block.is_stretch:
            return self.numbers(name, block.row * block.width, block.numbers)
        starts = range(block.row * block.width + block.column, (block.row + block.rows) * block.width, block.width)
        rows = [self.numbers(name, start, block.columns) for start in starts]
        return torch.cat(rows or [self.numbers(name, 0, 0)])

    def numbers(self, name: str, start: int, count: int) -> Tensor:
        """[count] of a tensor, laid flat, from number `start` on."""
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
        """Let go of the file."""
        os.close(self._file)


class TensorFile:
    """A file that is being written. Close it, or use it in `with`, once everything has come."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """
        Args:
            path: of the file, which is replaced.
            tensors: shapes and types of what it gets, best on the meta device.
        """
        self._shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self._left = {name: tensor.numel() for name, tensor in tensors.items()}
        header, self._offsets = _header(tensors)
        path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        write_at(self._file, torch.frombuffer(bytearray(header), dtype=torch.uint8), 0)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        missing = [name for name, count in self._left.items() if count]
        assert kind is not None or not missing, f"{len(missing)} tensors never came whole, {missing[0]} among them"

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor."""
        assert (tensor.shape, tensor.dtype) == self._shapes[name], f"{name} is {tensor.dtype} {list(tensor.shape)}"
        self.write_part(name, tensor, 0)

    def write_part(self, name: str, part: Tensor, start: int) -> None:
        """Write the numbers of a tensor, laid flat, from number `start` on."""
        write_at(self._file, part, self._offsets[name] + start * part.itemsize)
        self._left[name] -= part.numel()

    def close(self) -> None:
        """Let go of the file, whole or not."""
        os.close(self._file)


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file, and where each tensor begins in it."""
    offsets: dict[str, int] = {}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # As safetensors itself orders them: the larger types first, so that all are aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        tensor = tensors[name]
        offsets[name] = end
        end += tensor.numel() * tensor.dtype.itemsize
        place = {"shape": list(tensor.shape), "data_offsets": [offsets[name], end]}
        entries[name] = {"dtype": _TYPES[tensor.dtype], **place}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def write_at(file: int, tensor: Tensor, offset: int) -> None:
    """Write the numbers of a tensor into an open file; a full disk is an OSError."""
    if not tensor.numel():
        return
    left = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written

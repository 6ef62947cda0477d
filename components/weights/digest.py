"""Digests of tensors, with which an engine verifies that it has received the weights that the trainer published."""

from __future__ import annotations

import functools
import hashlib
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from components.weights.timing import SyncTimer

# Number of 4-byte words that are summed together. It is small enough for the cache. It is part of the definition of the
# digest: another value gives other digests.
_CHUNK = 2**18


# Number of such sums that are computed by the same operations, by device type. On a CPU the intermediate results must
# stay in the cache; a GPU would spend most of its time on launches.
_CHUNKS_AT_ONCE = {"cpu": 1, "cuda": 64}


class _Sums(NamedTuple):
    """Sums of one tensor, on its device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    totals: Tensor
    """[chunks] int64."""
    tail: Tensor
    """[bytes] uint8: bytes after the last whole word."""


class Digests:
    """Digests of many tensors. Sums are computed on the device of each tensor, and transferred together at the end."""

    def __init__(self, timer: SyncTimer | None = None) -> None:
        """
        Args:
            timer: measures the part "digest". Default: nothing is measured.
        """
        self._timer = timer or SyncTimer()
        self._sums: dict[str, _Sums] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Compute the sums of a tensor, which may be overwritten afterwards by operations on the same stream."""
        with self._timer.measure("digest"):
            row = tensor.detach().contiguous().view(-1).view(torch.uint8)
            whole = len(row) // 4 * 4
            # A copy, because the memory may be overwritten before the bytes are read.
            self._sums[name] = _Sums(tensor.dtype, tuple(tensor.shape), _totals(row[:whole]), row[whole:].clone())

    def result(self) -> dict[str, str]:
        """Return the digest of each tensor by name."""
        with self._timer.measure("digest"):
            listed = list(self._sums.values())
            totals = _transferred([sums.totals for sums in listed])
            tails = _transferred([sums.tail for sums in listed])
            contents = zip(self._sums.items(), totals, tails, strict=True)
            return {name: _text(sums, total, bytes(tail)) for (name, sums), total, tail in contents}


def digest(tensor: Tensor) -> str:
    """Return a digest of the dtype, shape and bytes of a tensor: 32 hexadecimal digits.

    It does not depend on the device or the memory layout. It detects errors, not forgeries. A change within a single
    4-byte word is always detected, any other change with a probability of 1 - 2^-32 per MiB that differs.
    """
    digests = Digests()
    digests.add("", tensor)
    return digests.result()[""]


def _text(sums: _Sums, totals: list[int], tail: bytes) -> str:
    content = repr((sums.dtype, sums.shape, totals, tail))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _transferred(tensors: list[Tensor]) -> list[list[int]]:
    """Return the content of tensors. If they are on one device, it is waited for once."""
    if not tensors:
        return []
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    flat = torch.cat(tensors).tolist()
    ends = list(accumulate(map(len, tensors), initial=0))
    return [flat[start:end] for start, end in pairwise(ends)]


def _totals(row: Tensor) -> Tensor:
    """Return one sum per chunk, [chunks] int64, of [bytes] uint8."""
    # torch cannot view a storage as int32 from an offset that is not a multiple of 4 bytes, so such a view is copied.
    words = (row if row.storage_offset() % 4 == 0 else row.clone()).view(torch.int32)
    most = min(_CHUNK, len(words))
    key = _key(row.device)
    chunks = len(words) // _CHUNK
    rows = min(max(chunks, 1), _CHUNKS_AT_ONCE[row.device.type])
    mixed = torch.empty((rows, most), dtype=torch.int32, device=row.device)
    scratch = torch.empty_like(mixed)
    parts = list(words[: chunks * _CHUNK].view(chunks, -1).split(rows)) if chunks else []
    # Without words there is one empty chunk. It is part of the definition of the digest.
    if len(words) % _CHUNK or not len(words):
        parts.append(words[chunks * _CHUNK :].unsqueeze(0))
    sums: list[Tensor] = []
    for part in parts:
        place = slice(len(part)), slice(part.shape[1])
        torch.bitwise_xor(part, key[: part.shape[1]], out=mixed[place])
        _mix(mixed[place], scratch[place])
        sums.append(mixed[place].sum(1))
    return torch.cat(sums)


@functools.cache
def _key(device: torch.device) -> Tensor:
    """Return the mixed positions of the words of a chunk. Kept, because most tensors of a model are small."""
    key = torch.arange(_CHUNK, dtype=torch.int32, device=device)
    _mix(key, torch.empty_like(key))
    return key


def _mix(words: Tensor, scratch: Tensor) -> None:
    """Mix the bits within each word in place. The mapping is a bijection; products wrap around."""
    for factor, shift in ((-1640531527, 15), (-2048144789, 13)):
        words.mul_(factor)
        torch.bitwise_right_shift(words, shift, out=scratch)
        words.bitwise_xor_(scratch)


def compare_digests(published: dict[str, str], received: dict[str, str]) -> list[str]:
    """Return the sorted names of the tensors whose digests differ or that are present on one side only."""
    names = sorted(published.keys() | received.keys())
    return [name for name in names if published.get(name) != received.get(name)]

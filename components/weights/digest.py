"""Digests of tensors, with which an engine verifies that it has received the weights that the trainer published."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# Number of 4-byte words that are summed together. It is small enough for the cache. It is part of the definition of the
# digest: another value gives other digests.
_CHUNK = 2**18


def digest(tensor: Tensor) -> str:
    """Return a digest of the dtype, shape and bytes of a tensor: 32 hexadecimal digits.

    It does not depend on the device or the memory layout. It detects errors, not forgeries. A change within a single
    4-byte word is always detected, any other change with a probability of 1 - 2^-32 per MiB that differs.
    """
    row = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(row) // 4 * 4
    # torch cannot view a storage as int32 from an offset that is not a multiple of 4 bytes, so such a view is copied.
    words = (row[:whole] if row.storage_offset() % 4 == 0 else row[:whole].clone()).view(torch.int32)
    tail = bytes(row[whole:].tolist())
    key = torch.arange(min(_CHUNK, len(words)), dtype=torch.int32, device=row.device)
    mixed, scratch = torch.empty_like(key), torch.empty_like(key)
    _mix(key, scratch)
    sums = []
    for chunk in words.split(_CHUNK):
        count = len(chunk)
        torch.bitwise_xor(chunk, key[:count], out=mixed[:count])
        _mix(mixed[:count], scratch[:count])
        sums.append(mixed[:count].sum())
    totals = torch.stack(sums).tolist() if sums else []
    return hashlib.blake2b(repr((tensor.dtype, tuple(tensor.shape), totals, tail)).encode(), digest_size=16).hexdigest()


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

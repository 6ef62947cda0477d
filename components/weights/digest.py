"""Digests of tensors, to see that what a sampler has is what the trainer published."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# Words of four bytes that are summed together: few enough for a cache, and part of the digest's definition.
_CHUNK = 2**18


def digest(tensor: Tensor) -> str:
    """32 hexadecimal digits from dtype, shape and bytes; the same on every device and for every memory layout.

    It finds errors, not forgeries. A change within a single word of four bytes is always found; anything else with a
    probability of 1 - 2^-32 per MiB that differs.
    """
    row = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(row) // 4 * 4
    # A view that does not start at a word cannot be seen as words.
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
    """Scatter the bits of each word over the word, one to one, in place; products wrap around."""
    for factor, shift in ((-1640531527, 15), (-2048144789, 13)):
        words.mul_(factor)
        torch.bitwise_right_shift(words, shift, out=scratch)
        words.bitwise_xor_(scratch)


def compare_digests(published: dict[str, str], received: dict[str, str]) -> list[str]:
    """Names of what differs, or is on one side alone."""
    names = sorted(published.keys() | received.keys())
    return [name for name in names if published.get(name) != received.get(name)]

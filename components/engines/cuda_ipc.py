"""Weights between processes on the same GPU: buckets whose memory other processes map, so that nothing is copied.

Needs no CUDA to be imported. Handles carry the GPU's UUID, since processes may number the same GPUs differently.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from components.engines.weight_buckets import Piece, buckets, pieces_of

# Which arguments of torch's rebuild function number the GPU, as the exporter counts, and name the counter of readers.
_DEVICE_ARGUMENT = 6
_COUNTER_ARGUMENTS = slice(11, 13)


@dataclass(frozen=True)
class _Mapped:
    gpu: str
    pieces: list[Piece]
    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]


class CudaBuckets:
    """Buckets in GPU memory, until they are closed. Pickled it is a handle of a few kilobytes."""

    def __init__(self, mapped: list[_Mapped], flats: list[Tensor]) -> None:
        self.mapped = mapped
        self.flats = flats
        self.origin = (os.getpid(), uuid4().hex)
        _of_this_process[self.origin] = self

    def close(self) -> None:
        """Give the memory up, whether anybody has mapped it or not."""
        for bucket, flat in zip(self.mapped, self.flats, strict=True):
            # torch keeps what it exported until a reader has had it, and there may never be one.
            counter, place = bucket.arguments[_COUNTER_ARGUMENTS]
            torch.UntypedStorage._release_ipc_counter(counter, place, device=flat.device)
        self.mapped, self.flats = [], []

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "flats": []}


_of_this_process: WeakValueDictionary[tuple[int, str], CudaBuckets] = WeakValueDictionary()


def gpu_uuid(device: torch.device | int | None = None) -> str:
    """Names a GPU alike in all processes; the current one by default. Empty where there is no CUDA."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).uuid)


def export_buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = 256 * 2**20) -> CudaBuckets:
    """Copy CUDA tensors into buckets that other processes on their GPU can map.

    Keep the result until the last reader has copied what it wants, then close it.

    Raises:
        ValueError: a tensor is not on a GPU, or a name comes twice.
    """
    mapped: list[_Mapped] = []
    flats: list[Tensor] = []
    for bucket in buckets(tensors, bucket_bytes):
        elsewhere = [
            piece.name for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True) if not tensor.is_cuda
        ]
        if elsewhere:
            raise ValueError(f"weights {elsewhere[:3]} are not on a GPU; publish them through shared memory")
        flat = bucket.flat()
        rebuild, arguments = reduce_tensor(flat)
        mapped.append(_Mapped(gpu_uuid(flat.device), bucket.pieces, rebuild, arguments))
        flats.append(flat)
    if flats:
        torch.cuda.synchronize(flats[0].device)
    return CudaBuckets(mapped, flats)


def open_buckets(exported: CudaBuckets) -> list[tuple[list[Piece], Tensor]]:
    """Tables and flat buffers of bytes, in the exporter's own memory.

    Raises:
        ValueError: no GPU of this process is the exporter's.
    """
    original = _of_this_process.get(exported.origin)
    if original is not None and exported.origin[0] == os.getpid():
        # CUDA does not let a process open its own handles.
        return [(bucket.pieces, flat) for bucket, flat in zip(original.mapped, original.flats, strict=True)]
    numbers = {gpu_uuid(number): number for number in range(torch.cuda.device_count())}
    opened = []
    for bucket in exported.mapped:
        if bucket.gpu not in numbers:
            raise ValueError(
                f"the weights lie on GPU {bucket.gpu}, and this process sees {sorted(numbers) or 'none'}; put both "
                "on one GPU, or publish without cuda_ipc"
            )
        arguments = list(bucket.arguments)
        arguments[_DEVICE_ARGUMENT] = numbers[bucket.gpu]
        opened.append((bucket.pieces, bucket.rebuild(*arguments)))
    return opened


def import_buckets(exported: CudaBuckets) -> Iterator[tuple[str, Tensor]]:
    """Names and views of the exporter's own memory: copy what you keep, and do not write.

    Raises:
        ValueError: no GPU of this process is the exporter's.
    """
    opened = open_buckets(exported)
    for pieces, flat in opened:
        yield from pieces_of(flat, pieces)
    if opened:
        # The consumer's last copies may still be on their way, and the mapping ends with this function.
        torch.cuda.synchronize(opened[0][1].device)

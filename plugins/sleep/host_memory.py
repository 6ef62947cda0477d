"""Temporary release of device memory: tensors are copied to the host and restored later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from components.models.gpu_lock import gpu_memory_locked

PIECE_BYTES = 2**28
"""Size in bytes of the pieces in which host copies are allocated. torch rounds each pinned allocation up to a power of
two, so a single large copy could take almost twice its size."""


class HostCopies:
    """Host copies of tensors whose device memory is freed until `restore`. Until then, neither the tensors nor any
    views of them may be used.

    Storages are resized to 0 instead of replacing tensors, so that existing views remain valid after `restore`.
    """

    def __init__(self, tensors: Iterable[Any], scratch: Iterable[Any] = (), device_type: str = "cuda") -> None:
        """
        Args:
            tensors: tensors to move. Those on other device types are ignored. They may share memory, or be DTensors.
            scratch: tensors whose content is discarded; `restore` fills them with zeros. They may be among `tensors`
                too.
            device_type: type of the device whose memory is freed.
        """
        self.nbytes = 0
        """Number of bytes of device memory that were freed."""
        self._device_type = device_type
        self._freed: list[tuple[torch.UntypedStorage, int, list[Tensor]]] = []
        with gpu_memory_locked():
            for tensor in scratch:
                self._free(tensor, is_needed=False)
            for tensor in tensors:
                self._free(tensor, is_needed=True)
            # torch caches freed memory for itself; other processes can use it only after this call.
            if device_type == "cuda" and self._freed:
                torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate the device memory again and restore its content."""
        with gpu_memory_locked():
            self._restore()

    def _restore(self) -> None:
        for storage, size, copies in self._freed:
            storage.resize_(size)
            content = _content(storage)
            if not copies:
                content.zero_()
            for piece, copy in zip(content.split(PIECE_BYTES), copies, strict=bool(copies)):
                piece.copy_(copy)
        self._freed.clear()

    def _free(self, tensor: Any, is_needed: bool) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        size = storage.nbytes()
        # A size of 0 means that the storage is shared with a tensor that was freed before.
        if storage.device.type != self._device_type or not size or not storage.resizable():
            return
        copies = []
        for piece in _content(storage).split(PIECE_BYTES) if is_needed else ():
            copy = torch.empty(len(piece), dtype=torch.uint8, pin_memory=self._device_type == "cuda")
            copies.append(copy.copy_(piece))
        self._freed.append((storage, size, copies))
        storage.resize_(0)
        self.nbytes += size


def _content(storage: torch.UntypedStorage) -> Tensor:
    """Return a view of all bytes of a storage, [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

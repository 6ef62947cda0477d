"""The memory of a device, lent to somebody else for a while: its content waits on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """What tensors of a device hold. Until `restore` they, and all views of them, stand for memory that is not there.

    Whole storages are freed, not tensors replaced, so that nobody who keeps a view has to be told.
    """

    def __init__(self, tensors: Iterable[Any], scratch: Iterable[Tensor] = (), device_type: str = "cuda") -> None:
        """
        Args:
            tensors: of which those on such a device are moved; they may share memory, or be DTensors.
            scratch: the same, but nobody needs what they hold.
            device_type: of the memory that is freed.
        """
        self.nbytes = 0
        """Of device memory that was freed."""
        self._freed: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        for tensor, is_needed in [*((tensor, True) for tensor in tensors), *((tensor, False) for tensor in scratch)]:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            size = storage.nbytes()
            # A size of 0: shared with a tensor before.
            if storage.device.type != device_type or not size or not storage.resizable():
                continue
            copy = torch.empty(size, dtype=torch.uint8, pin_memory=device_type == "cuda") if is_needed else None
            self._freed.append((storage, size, None if copy is None else copy.copy_(_content(storage))))
            storage.resize_(0)
            self.nbytes += size
        if device_type == "cuda" and self._freed:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Bring everything back."""
        for storage, size, copy in self._freed:
            storage.resize_(size)
            if copy is not None:
                _content(storage).copy_(copy)
        self._freed.clear()


def _content(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of it, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

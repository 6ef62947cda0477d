"""The memory of a device, lent to somebody else for a while: its content waits on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 2**28
"""Of a copy that is allocated at once: torch rounds what it pins up to a power of two."""


class HostCopies:
    """What tensors of a device hold. Until `restore` they, and all views of them, stand for memory that is not there.

    Whole storages are freed, not tensors replaced, so that nobody who keeps a view has to be told.
    """

    def __init__(self, tensors: Iterable[Any], scratch: Iterable[Any] = (), device_type: str = "cuda") -> None:
        """
        Args:
            tensors: of which those on such a device are moved; they may share memory, or be DTensors.
            scratch: the same, but nobody needs what they hold: `restore` fills them with zeros. They may be among
                `tensors` too.
            device_type: of the memory that is freed.
        """
        self.nbytes = 0
        """Of device memory that was freed."""
        self._device_type = device_type
        self._freed: list[tuple[torch.UntypedStorage, int, list[Tensor]]] = []
        for tensor in scratch:
            self._free(tensor, is_needed=False)
        for tensor in tensors:
            self._free(tensor, is_needed=True)
        if device_type == "cuda" and self._freed:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Bring everything back."""
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
        # A size of 0: shared with a tensor before.
        if storage.device.type != self._device_type or not size or not storage.resizable():
            return
        copies = []
        for piece in _content(storage).split(PIECE_BYTES) if is_needed else ():
            copy = torch.empty(len(piece), dtype=torch.uint8, pin_memory=self._device_type == "cuda")
            copies.append(copy.copy_(piece))
        self._freed.append((storage, size, copies))
        storage.resize_(0)
        self.nbytes += size


def tensors_within(value: object) -> Iterator[Tensor]:
    """The tensors of nested lists, tuples, sets and dicts, keys too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from tensors_within(pair)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_within(item)


def _content(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of it, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

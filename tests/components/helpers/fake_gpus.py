"""Stand-in for CUDA's list of devices on a machine without GPUs: their number, and the current one of each thread."""

from __future__ import annotations

import threading

import pytest
import torch


class FakeGPUs:
    """Replaces the functions of torch.cuda that count and select devices. As in CUDA, each thread starts at device 0.

    `contexts` counts calls that would create a CUDA context in this process.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self._threads = threading.local()
        self.contexts = 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", self.select)
        monkeypatch.setattr(torch.cuda, "current_device", self.current)

    def select(self, device: torch.device | int) -> None:
        self._threads.index = device.index if isinstance(device, torch.device) else device

    def current(self) -> int:
        self.contexts += 1
        return getattr(self._threads, "index", 0)

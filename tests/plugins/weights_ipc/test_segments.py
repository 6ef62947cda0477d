"""Buckets for CUDA IPC with expandable segments. The allocator's functions are stand-ins that record their calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from plugins.weights_ipc.carrier import _Transfer

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("settings", ["max_split_size_mb:128,expandable_segments:True", "expandable_segments: true"])
def test_a_bucket_is_allocated_in_a_fixed_segment_and_no_setting_is_lost(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: str
) -> None:
    calls: list[str] = []

    @contextlib.contextmanager
    def use_pool(pool: str) -> Iterator[None]:
        calls.append(f"use {pool}")
        yield
        calls.append("end")

    for other in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, settings)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "a pool")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_pool)
    transfer = _Transfer([], CPU, 4096, False, 1.0, None, None)
    weights = {"a": torch.ones(8)}
    assert list(dict(transfer.passed(weights.items()))) == ["a"]
    fixed = settings.replace("True", "False").replace(" true", "False")
    assert calls == [fixed, "use a pool", "end", settings]


def test_without_expandable_segments_the_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    transfer = _Transfer([], CPU, 4096, False, 1.0, None, None)
    assert [name for name, _ in transfer.passed([("a", torch.ones(8))])] == ["a"]
    assert calls == []

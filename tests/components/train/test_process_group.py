"""The process group of ranks on GPUs, and their devices. CUDA's list of devices is a stand-in; nothing is computed."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from components.models.loading import load_policy
from components.net.listening import listen_at
from components.train import engine
from components.train.config import TrainConfig
from components.train.opening import open_engine
from components.train.process_group import _meeting_store, init_process_group
from tests.components.helpers.fake_gpus import FakeGPUs
from tests.components.helpers.ranks import run_ranks


@pytest.mark.parametrize(("local_rank", "index"), [("2", 2), ("5", 1)])
def test_a_group_on_gpus_names_its_device_and_sends_objects_through_the_host(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, index: int
) -> None:
    FakeGPUs(monkeypatch, count=4)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: calls.append((backend, options["device_id"]))
    )
    init_process_group()
    assert calls == [("cpu:gloo,cuda:nccl", torch.device("cuda", index))]
    # Rank 0 has two groups on its GPU, whose operations must have one order.
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


def device_of_engine(model_path: str) -> str:
    """Return the device of a training engine in a process whose device has an index."""
    engine.compute_device = lambda: torch.device("cpu", 0)
    config = TrainConfig(engine="fsdp", zero_stage=3, learning_rate=0.1, total_steps=1)
    return str(open_engine(load_policy(model_path), config).device)


def test_a_training_engine_keeps_the_index_of_its_device(tied_model: Path, tmp_path: Path) -> None:
    # Threads start at device 0, so a device without an index would be another GPU in a thread.
    assert run_ranks(device_of_engine, 1, tmp_path, str(tied_model)) == ["cpu:0"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_ranks_meet_at_an_ipv4_or_ipv6_address_and_no_other(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with listen_at(address) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = _meeting_store(0, 1, timedelta(seconds=20))
    assert store is not None
    store.set("key", "value")
    assert store.get("key") == b"value"
    other = {"127.0.0.1": "::1", "::1": "127.0.0.1"}[address]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, port), timeout=20)

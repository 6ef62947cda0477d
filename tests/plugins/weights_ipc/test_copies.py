"""Number of times that a weight sync writes each byte, counted from torch's operations."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from components.weights.buckets import ALIGNMENT
from components.weights.carrier import CarrierSetting
from components.weights.digest import Digests, digest
from components.weights.publisher import WeightHandle, read_digests, read_weights, weight_shapes
from plugins.weights_ipc.carrier import BucketSender, IPCCarrier, read_sent
from tests.components.helpers.ranks import FORKS
from tests.components.helpers.written_bytes import WrittenBytes

CPU = torch.device("cpu")
BUCKET_BYTES = 2**15
MOST_WRITES = 3
"""Writes into the rank's bucket, the engine's copy and the engine's parameter."""


def trained_weights() -> dict[str, Tensor]:
    """Return float32 parameters of a layer-like mixture of sizes."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(64, 48), (48,), (48, 48), (3, 5), (200, 64), (1,)] * 8
    return {f"{i}.weight": nn.Parameter(torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)}


def test_a_byte_is_written_three_times_at_most(tmp_path: Path) -> None:
    weights = trained_weights()
    loaded = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in weights.items()}
    nbytes = sum(tensor.nbytes for tensor in loaded.values())
    sender = BucketSender(tmp_path, CPU, readers=1, bucket_bytes=BUCKET_BYTES)
    received = WrittenBytes()

    def read() -> None:
        with received:
            for name, tensor in read_sent(tmp_path, 1, timeout_seconds=60):
                loaded[name].copy_(tensor)

    reader = threading.Thread(target=read)
    reader.start()
    with WrittenBytes() as sent:
        for _ in sender.sent(1, weights.items(), torch.bfloat16):
            pass
    reader.join()
    sender.close()
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor.detach().to(torch.bfloat16)), name
    # When a bucket is mapped for the first time, torch moves it into shared memory. On a GPU it is mapped in place.
    moved = sent.by_operation.pop("copy_")
    assert (moved, sent.calls.pop("copy_")) == (2 * BUCKET_BYTES, 2)
    # Each tensor begins at an aligned offset, and the engine also copies the gaps.
    gaps = ALIGNMENT * len(weights)
    assert sent.by_operation == {"_foreach_copy_": nbytes}
    assert MOST_WRITES * nbytes <= sent.total + received.total <= MOST_WRITES * nbytes + gaps, received.by_operation
    # One operation casts and copies all tensors of a bucket.
    assert sent.calls["_foreach_copy_"] == received.calls["clone"] < len(weights) / 3


class Allocations(TorchDispatchMode):
    """Size in bytes of each tensor that an operation has allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.clone, torch.ops.aten._to_copy):
            self.sizes.append(result.nbytes)
        return result


def test_a_weight_larger_than_a_bucket_is_cut_into_slices(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = {"before": (7, 5), "large": (301, 457), "between": (3,), "twice": (2, BUCKET_BYTES // 2), "after": (11,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    expected = {name: tensor.bfloat16() for name, tensor in weights.items()}
    sender = BucketSender(tmp_path, CPU, readers=1, bucket_bytes=BUCKET_BYTES)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    received = WrittenBytes()

    def read() -> None:
        with received:
            for name, tensor in read_sent(tmp_path, 1, timeout_seconds=60):
                loaded[name].copy_(tensor)

    reader = threading.Thread(target=read)
    reader.start()
    with WrittenBytes() as sent, Allocations() as allocations:
        for _ in sender.sent(1, weights.items(), torch.bfloat16):
            pass
    reader.join()
    sender.close()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    assert [size for size in allocations.sizes if size] == [BUCKET_BYTES, BUCKET_BYTES]
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    del sent.by_operation["copy_"]  # torch moves both buckets into shared memory
    gaps = ALIGNMENT * len(weights)
    assert MOST_WRITES * nbytes <= sent.total + received.total <= MOST_WRITES * nbytes + gaps, received.by_operation


def carrier_of(folder: Path, *, keeps: bool = False, readers: int = 1) -> IPCCarrier:
    return IPCCarrier(
        CarrierSetting(
            rank=0,
            device=CPU,
            shared_dir=folder,
            fallback_dir=folder / "disk",
            readers=readers,
            serve=False,
            keeps=keeps,
        )
    )


def bytes_in(folder: Path) -> int:
    """Return the number of bytes of weights in the folders of all versions."""
    return sum(path.stat().st_size for path in folder.rglob("weights.bin"))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_version_passes_the_host_only_if_the_ranks_cannot_send_it_again(tmp_path: Path, keeps: bool) -> None:
    weights = trained_weights()
    expected = {name: digest(tensor.detach().to(torch.bfloat16)) for name, tensor in weights.items()}
    nbytes = sum(tensor.nbytes // 2 for tensor in weights.values())
    carrier = carrier_of(tmp_path, keeps=keeps)
    handles = []
    for version in (1, 2):
        announced = carrier.announce(version)
        assert announced is not None
        received = Digests()

        def read(handle: WeightHandle, digests: Digests) -> None:
            for name, tensor in read_weights(handle):
                digests.add(name, tensor)

        reader = threading.Thread(target=read, args=(announced, received))
        reader.start()
        with WrittenBytes() as sent:
            handle = carrier.publish(version, weights.items(), dtype=torch.bfloat16, with_digests=True, adapter_scale=0)
        reader.join()
        assert handle is not None
        assert received.result() == read_digests(announced) == read_digests(handle) == expected
        assert weight_shapes(announced) == {name: tuple(tensor.shape) for name, tensor in weights.items()}
        # Besides the digests, the bucket is the only copy that torch makes on the rank.
        assert sent.by_operation["_foreach_copy_"] == nbytes
        handles.append(announced)
    assert (bytes_in(tmp_path) >= 2 * nbytes) if keeps else bytes_in(tmp_path) == 0
    if keeps:
        kept = replace(handles[-1], is_sent=False)
        assert {name: digest(tensor) for name, tensor in read_weights(kept)} == expected
    carrier.close()


class Gathering:
    """A carrier and the parameters that it publishes. Counts how often they are gathered."""

    def __init__(self, carrier: IPCCarrier) -> None:
        self.carrier = carrier
        self.count = 0
        self.weights = trained_weights()
        self.expected = {name: digest(tensor.detach().to(torch.bfloat16)) for name, tensor in self.weights.items()}

    def publish(self, version: int, again: WeightHandle | None = None) -> WeightHandle:
        def parameters() -> Iterator[tuple[str, Tensor]]:
            self.count += 1
            yield from self.weights.items()

        handle = self.carrier.publish(
            version, parameters(), dtype=torch.bfloat16, with_digests=True, adapter_scale=0, again=again
        )
        assert handle is not None
        return handle


def read_process(handle: WeightHandle, dies: bool, reports_queue: SimpleQueue[Any]) -> None:
    """Read a version in an engine's process and report its digests, or die in the middle."""
    digests = {}
    for name, tensor in read_weights(handle):
        digests[name] = digest(tensor)
        if dies and len(digests) == 3:
            os._exit(9)
    reports_queue.put(digests)


def test_an_engine_that_replaces_a_killed_one_is_sent_the_version_again(tmp_path: Path) -> None:
    gathering = Gathering(carrier_of(tmp_path, readers=2))
    carrier, expected = gathering.carrier, gathering.expected
    announced = carrier.announce(1)
    assert announced is not None
    reports_queue = FORKS.SimpleQueue()
    engines = [
        FORKS.Process(target=read_process, args=(replace(announced, reader=reader), reader == 2, reports_queue))
        for reader in (1, 2)
    ]
    for engine in engines:
        engine.start()
    gathering.publish(1)
    for engine in engines:
        engine.join()
    assert ([engine.exitcode for engine in engines], reports_queue.get()) == ([0, 9], expected)

    # The replacement is late for the version, and sees that at once.
    late = replace(announced, reader=2)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="was sent before"):
        list(read_weights(late))
    assert time.monotonic() - began < 5
    again = replace(late, resend="first")
    loaded = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in gathering.weights.items()}
    received = WrittenBytes()

    def load() -> None:
        with received:
            for name, tensor in read_weights(again):
                loaded[name].copy_(tensor)

    reader = threading.Thread(target=load)
    reader.start()
    with WrittenBytes() as sent:
        assert gathering.publish(1, again) == again
    reader.join()
    assert {name: digest(tensor) for name, tensor in loaded.items()} == expected == read_digests(again)
    # No byte of the weights is on the host, and each one is written three times at most.
    assert bytes_in(tmp_path) == 0
    nbytes = sum(tensor.nbytes for tensor in loaded.values())
    assert sent.by_operation["_foreach_copy_"] == nbytes
    del sent.by_operation["copy_"]  # torch moves the buckets into shared memory
    gaps = ALIGNMENT * len(loaded)
    assert MOST_WRITES * nbytes <= sent.total + received.total <= MOST_WRITES * nbytes + gaps
    assert gathering.count == 2
    carrier.close()


def test_a_version_is_written_once_if_engines_do_not_receive_it_twice(tmp_path: Path) -> None:
    gathering = Gathering(carrier_of(tmp_path, readers=1))
    carrier = gathering.carrier

    def send(version: int) -> WeightHandle:
        announced = carrier.announce(version)
        assert announced is not None
        reader = threading.Thread(target=lambda: list(read_weights(announced)))
        reader.start()
        gathering.publish(version)
        reader.join()
        return announced

    announced = send(1)
    for _ in range(2):
        handle = gathering.publish(1, replace(announced, is_sent=False))
        digests = {name: digest(tensor) for name, tensor in read_weights(handle)}
        assert read_digests(handle) == digests == gathering.expected
    assert gathering.count == 2
    assert bytes_in(tmp_path) > 0
    send(2)
    assert bytes_in(tmp_path) == 0
    carrier.close()


def test_a_rank_does_not_wait_for_an_engine_on_another_device(tmp_path: Path) -> None:
    sender = BucketSender(tmp_path, CPU, readers=1, bucket_bytes=BUCKET_BYTES)
    weights = trained_weights()
    reader = threading.Thread(target=lambda: list(read_sent(tmp_path, 1, 60, number=1)))
    reader.start()
    list(sender.sent(1, weights.items()))
    reader.join()
    began = time.monotonic()
    passed = dict(sender.sent_again(1, "of engine 2", [2], weights.items()))
    assert time.monotonic() - began < 5
    assert passed == weights
    sender.close()

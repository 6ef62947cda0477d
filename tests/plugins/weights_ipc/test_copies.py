"""Number of times that a weight sync writes each byte, counted from torch's operations."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import Tensor, nn

from components.weights.buckets import ALIGNMENT
from components.weights.carrier import CarrierSetting
from components.weights.digest import Digests, digest
from components.weights.publisher import read_digests, read_weights
from plugins.weights_ipc.carrier import BucketSender, IPCCarrier, read_sent
from tests.components.helpers.written_bytes import WrittenBytes

CPU = torch.device("cpu")
BUCKET_BYTES = 2**15
MOST_WRITES = 3
"""Bucket of the rank, copy of the engine, parameter of the engine."""


def trained_weights() -> dict[str, Tensor]:
    """Return float32 parameters of a layer-like mixture of sizes."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(64, 48), (48,), (48, 48), (3, 5), (200, 64), (1,)] * 8
    return {f"{i}.weight": nn.Parameter(torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)}


def test_a_byte_is_written_three_times_at_most(tmp_path: Path) -> None:
    weights = trained_weights()
    loaded = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in weights.items()}
    nbytes = sum(tensor.nbytes for tensor in loaded.values())
    sender = BucketSender(tmp_path, CPU, readers=1, bucket_bytes=BUCKET_BYTES, to_host=False)
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
    # The first time that a bucket is mapped, torch moves it into shared memory. It maps a bucket on a GPU where it is.
    moved = sent.by_operation.pop("copy_")
    assert (moved, sent.calls.pop("copy_")) == (2 * BUCKET_BYTES, 2)
    # Each tensor begins at an aligned offset, and the engine copies the gaps too.
    gaps = ALIGNMENT * len(weights)
    assert sent.by_operation == {"_foreach_copy_": nbytes}
    assert MOST_WRITES * nbytes <= sent.total + received.total <= MOST_WRITES * nbytes + gaps, received.by_operation
    # One operation casts and copies all tensors of a bucket.
    assert sent.calls["_foreach_copy_"] == received.calls["clone"] < len(weights) / 3


def test_digests_of_the_bucket_are_those_of_the_tensors_that_were_read(tmp_path: Path) -> None:
    weights = trained_weights()
    setting = CarrierSetting(
        rank=0, device=CPU, shared_dir=tmp_path, fallback_dir=tmp_path / "disk", readers=1, serve=False
    )
    carrier = IPCCarrier(setting)
    received = Digests()

    def read() -> None:
        for name, tensor in read_sent(tmp_path, 1, timeout_seconds=60):
            received.add(name, tensor)

    reader = threading.Thread(target=read)
    reader.start()
    handle = carrier.publish(1, weights.items(), dtype=torch.bfloat16, with_digests=True, adapter_scale=0.0)
    reader.join()
    assert handle is not None
    expected = {name: digest(tensor.detach().to(torch.bfloat16)) for name, tensor in weights.items()}
    assert received.result() == read_digests(handle) == expected
    assert {name: digest(tensor) for name, tensor in read_weights(handle)} == expected
    carrier.close()

"""Processes for the tests of weights_tcp: `python weight_worker.py publish FOLDER` or `... read HANDLE_FILE`."""

import os
import pickle
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from components.weights.publisher import WeightPublisher, read_weights

BUCKET_BYTES = 4 * 2**20
NUM_WEIGHTS = 16


def large_weights() -> Iterator[tuple[str, Tensor]]:
    """16 tensors of 4 MiB each. Each one fills a bucket. Tensor i is filled with the value i."""
    for number in range(NUM_WEIGHTS):
        yield f"weight{number}", torch.full((2**20,), float(number))


def publish(folder: Path) -> None:
    """Publish once, write the handle to a file, and run until killed."""
    publisher = WeightPublisher(folder / "w", bucket_bytes=BUCKET_BYTES, serve=True)
    (folder / "handle.partial").write_bytes(pickle.dumps(publisher.publish(1, large_weights())))
    (folder / "handle.partial").rename(folder / "handle")
    sys.stdin.read()


def read(handle_file: Path) -> None:
    """Read everything, print the peak growth of memory in KiB, read again and die in the middle."""
    handle = pickle.loads(handle_file.read_bytes())
    sums = torch.zeros(NUM_WEIGHTS)
    torch.ones(2**20).sum()
    # Memory of the start-up is returned first. Otherwise it would hide the memory that reading needs.
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    most = 0
    for number, (_, tensor) in enumerate(read_weights(handle)):
        sums[number] = tensor.mean()
        now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        most = max(most, now - before)
    assert sums.tolist() == list(range(NUM_WEIGHTS))
    print(most, flush=True)
    weights = read_weights(handle)
    next(weights)
    os._exit(9)


if __name__ == "__main__":
    {"publish": publish, "read": read}[sys.argv[1]](Path(sys.argv[2]))

"""Copies of micro-batches to a GPU, one ahead of the computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from components.batch import Batch


def feed(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches on a device. The next one is copied on a stream of its own while the last one is computed.

    Args:
        batches: batches on the host. One is taken ahead.
        device: device of the computations, whose current stream runs them.
    """
    streams: Any = torch.get_device_module(device)
    copies = streams.Stream()
    computations = streams.current_stream()
    ahead: Batch | None = None
    for batch in batches:
        # Waits for the copy of `ahead` only, because the next copy is not queued yet.
        computations.wait_stream(copies)
        # The next copy may reuse the memory of a batch whose computation has not finished.
        copies.wait_stream(computations)
        with streams.stream(copies):
            copied = batch.to(device)
        if ahead is not None:
            yield ahead
        ahead = copied
    computations.wait_stream(copies)
    if ahead is not None:
        yield ahead

"""The order in which micro-batches are taken and computed. torch's streams of a CPU do nothing."""

from collections.abc import Iterator

import torch

from components.batch import Batch
from plugins.gpu_feed.feed import feed


def test_one_batch_is_taken_ahead() -> None:
    events: list[str] = []

    def batches() -> Iterator[Batch]:
        for i in range(3):
            events.append(f"taken {i}")
            yield Batch([i + 1], {"tokens": torch.full((i + 1,), i)})

    for batch in feed(batches(), torch.device("cpu")):
        number = int(batch["tokens"][0])
        events.append(f"computed {number}")
    assert events == ["taken 0", "taken 1", "computed 0", "taken 2", "computed 1", "computed 2"]


def test_no_batch() -> None:
    assert list(feed([], torch.device("cpu"))) == []

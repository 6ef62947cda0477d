"""Weights that are sharded over the ranks are gathered on rank 0 bit for bit, with two buckets of extra memory."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.components.helpers.gather_worker import BUCKET_BYTES, LARGE, divided_rows, every_layout, grows_by, wholes
from tests.components.helpers.ranks import run_ranks


@pytest.mark.parametrize("bucket_bytes", [1, 300, 2**20])
@pytest.mark.parametrize("everywhere", [False, True])
def test_sharded_weights_are_gathered_on_rank_0_or_on_all_ranks(
    tmp_path: Path, bucket_bytes: int, everywhere: bool
) -> None:
    arrived, *others = run_ranks(every_layout, 4, tmp_path, bucket_bytes, everywhere)
    assert [len(other) for other in others] == [len(arrived) if everywhere else 0] * 3
    assert len(arrived) == 4 * 6 + 4
    for name, tensor in chain.from_iterable(each.items() for each in (arrived, *others)):
        whole, _, dtype = name.split(", ")
        expected = wholes()[whole].to(getattr(torch, dtype.removeprefix("torch.")))
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_divided_rows_arrive_on_all_ranks_by_one_collective_per_bucket_without_a_join(
    tmp_path: Path, world_size: int, bucket_bytes: int
) -> None:
    for weights, collectives, written in run_ranks(divided_rows, world_size, tmp_path, bucket_bytes):
        assert len(weights) == 2 * len(wholes())
        for name, tensor in weights.items():
            assert torch.equal(tensor, wholes()[name.split(", ")[0]]), name
        buckets = 1 if bucket_bytes > 1 else 2 * sum(tensor.numel() > 0 for tensor in wholes().values())
        assert collectives == ["allgather_into_tensor_coalesced_"] * buckets
        # Only a shard that is shorter than the first one is written, to be padded.
        longest = sum(-(-len(tensor) // world_size) * tensor[:1].nbytes for tensor in wholes().values())
        assert sum(written.values()) <= 2 * 2 * longest, written
        assert set(written) <= {"constant_pad_nd", "fill_", "copy_"}


@pytest.mark.full
def test_rank_0_holds_at_most_two_buckets_and_a_weight_besides_its_shard(
    tmp_path: Path,
) -> None:
    rank_0, other = run_ranks(grows_by, 2, tmp_path)
    assert BUCKET_BYTES // 2 < rank_0 < 2 * BUCKET_BYTES + LARGE + 2**24
    assert other == 0

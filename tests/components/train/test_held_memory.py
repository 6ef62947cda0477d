"""No rank ever holds more of a model than its shard and the tensors in transfer, from loading to export.

Measured like in scripts/bench_memory.py, with 50 million parameters and buckets of 8 MiB, from /proc.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.components.helpers.memory_worker import BUCKET_BYTES, LAYERS, bench, growth
from tests.components.helpers.ranks import run_ranks

pytestmark = pytest.mark.full
RANKS = 2
BESIDES = 72_000_000
"""Bytes that the first pass of a process needs for libraries and malloc: 10 to 45 million were measured. A rank with
the complete model in bfloat16 would need 101 million, 51 million more than its shard.
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("model")
    return folder, bench.write_model(folder / "model", LAYERS)


def grown(folder: Path, kind: str, work: str) -> tuple[dict[str, int], str]:
    """Peak growth of a rank's memory in each phase, and the digest of rank 0."""
    records: list[dict[str, Any]] = run_ranks(growth, RANKS, folder / f"{kind}-{work}", str(folder), kind, work)
    digest = records[0]["digest"]
    return {name: max(record[name] for record in records) for name in records[0] if name != "digest"}, digest


def test_a_frozen_model_is_read_and_exported_tensor_by_tensor(model: tuple[Path, int]) -> None:
    folder, parameters = model
    peaks, _ = grown(folder, "frozen", "train")
    assert 0 < peaks["load"] - 2 * parameters // RANKS < BESIDES
    assert peaks["save_hf"] < BESIDES


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.nightly)])
def test_a_trained_model_is_read_saved_exported_and_resumed_tensor_by_tensor(
    model: tuple[Path, int], kind: str
) -> None:
    folder, parameters = model
    peaks, trained = grown(folder, kind, "train")
    if kind == "fsdp":  # DeepSpeed allocates gradients and buffers together with the weights
        assert peaks["load"] - 4 * parameters // RANKS < BESIDES
    assert peaks["save_state"] < BESIDES
    assert peaks["save_hf"] < 2 * BUCKET_BYTES + BESIDES
    peaks, loaded = grown(folder, kind, "load")
    # AdamW's moments come with the state.
    assert peaks["load_state"] - 8 * parameters // RANKS < 2 * BESIDES
    assert loaded == trained

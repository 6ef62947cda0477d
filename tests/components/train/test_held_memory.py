"""No rank ever holds more of a model than its part and what is on its way, from loading it to exporting it.

As scripts/bench_memory.py measures it, with 50 million parameters and buckets of 8 MiB, by what /proc says.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.components.helpers.memory_worker import BUCKET_BYTES, LAYERS, bench, growth
from tests.components.helpers.ranks import run_ranks

pytestmark = pytest.mark.full
RANKS = 2
BESIDES = 72_000_000
"""Bytes that the first pass of a process takes for libraries, and malloc for itself: 10 to 45 million have been seen. A
rank that had all of the model in bfloat16 would take 101 million, or 51 more than its part."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("model")
    return folder, bench.write_model(folder / "model", LAYERS)


def grown(folder: Path, kind: str, work: str) -> tuple[dict[str, int], str]:
    """By how much the memory of a rank grew at most in each phase, and the digest of rank 0."""
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
    if kind == "fsdp":  # DeepSpeed's engine takes its gradients and buffers with the weights
        assert peaks["load"] - 4 * parameters // RANKS < BESIDES
    assert peaks["save_state"] < BESIDES
    assert peaks["save_hf"] < 2 * BUCKET_BYTES + BESIDES
    peaks, loaded = grown(folder, kind, "load")
    # AdamW's moments come with the state.
    assert peaks["load_state"] - 8 * parameters // RANKS < 2 * BESIDES
    assert loaded == trained

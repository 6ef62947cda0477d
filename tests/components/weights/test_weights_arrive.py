"""Weights of every training engine reach every rollout engine: sampling uses the trained weights."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.components.helpers.publish_worker import Published, publish
from tests.components.helpers.ranks import WORLD_SIZES, run_ranks
from tests.components.helpers.receive_worker import FAULTS, faults
from tests.components.helpers.vllm_models import write_vllm_model

PublishedBy = Callable[[int], list[Published]]
"""The 8 versions that this number of ranks published. No two are equal."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sync")
    for seed, name in enumerate(("tied", "untied")):
        write_vllm_model(folder / name, seed=50 + seed, tied=name == "tied")
    return folder


@pytest.fixture(scope="module")
def published_by(models: Path) -> Iterator[PublishedBy]:
    name = f"troupe-test-{os.getpid()}"

    @cache
    def run(world_size: int) -> list[Published]:
        return run_ranks(publish, world_size, models / f"ranks{world_size}", models, name)[0]

    try:
        yield run
    finally:
        for version in Path("/dev/shm").glob(f"{name}-*"):
            shutil.rmtree(version)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_hf_has_the_log_probs_of_the_trainer_after_a_weight_sync(
    models: Path, published_by: PublishedBy, world_size: int
) -> None:
    assert len(published_by(world_size)) == 8
    assert faults(models, "hf", published_by(world_size)) == []


@pytest.mark.vllm
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("in process", marks=pytest.mark.full),
        pytest.param("own process", marks=pytest.mark.nightly),
        pytest.param("two processes", marks=pytest.mark.nightly),
    ],
)
def test_vllm_has_the_log_probs_of_the_trainer_after_a_weight_sync(
    kind: str, models: Path, published_by: PublishedBy, tmp_path: Path
) -> None:
    """In a separate process, because vLLM changes the state of its process."""
    (tmp_path / "published").write_bytes(pickle.dumps(published_by(1) + published_by(2)))
    worker = str(Path(__file__).parents[1] / "helpers" / "receive_worker.py")
    done = subprocess.run(
        [sys.executable, worker, str(models), kind, str(tmp_path / "published")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(FAULTS))
    assert json.loads(line.removeprefix(FAULTS)) == []

"""From every training engine to every rollout engine: what was learnt is what is sampled from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.components.engines.conftest import RunRanks
from tests.components.engines.receive_worker import KINDS
from tests.components.engines.vllm_models import write_vllm_model

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sync")
    for seed, name in enumerate(("tied", "untied")):
        write_vllm_model(folder / name, seed=50 + seed, tied=name == "tied")
    return folder


@pytest.fixture(scope="module")
def published(models: Path, run_ranks: RunRanks) -> Iterator[list[str]]:
    """What 1 rank and 2 ranks have published: 16 versions, no two of them alike."""
    name = f"troupe-test-{os.getpid()}"
    folders = {world_size: models / f"{name}-{world_size}" for world_size in (1, 2)}
    try:
        run_ranks({size: [str(models), str(folder)] for size, folder in folders.items()}, "publish_worker.py")
        yield [str(folder / "published.pickle") for folder in folders.values()]
    finally:
        for version in Path("/dev/shm").glob(f"{name}-*"):
            shutil.rmtree(version)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "hf" else pytest.mark.vllm) for kind in KINDS])
def test_each_engine_answers_as_the_trainer_whose_weights_it_received(
    kind: str, models: Path, published: list[str]
) -> None:
    # Both models at the same time: one starts on each core.
    command = [sys.executable, str(HERE / "receive_worker.py"), str(models)]
    started = [
        subprocess.Popen(
            [*command, name, kind, *published], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name in ("tied", "untied")
    ]
    for process in started:
        output, _ = process.communicate(timeout=280)
        lines = [line for line in output.splitlines() if "arrived" in line or f"{kind}, " in line]
        assert (process.returncode, lines) == (0, ["8 versions arrived"]), output

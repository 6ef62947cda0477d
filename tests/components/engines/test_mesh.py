"""Training on meshes of ranks equals training by one process: losses, norms, weights, log-probabilities."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from components.engines.config import TrainConfig
from components.engines.memory import learning
from components.engines.model_size import model_size
from tests.components.engines import mesh_worker
from tests.components.engines.ranks import run_ranks
from tests.messages import says

Records = list[dict[str, Any]]
RanksOf = Callable[[int], Records]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh_models")
    mesh_worker.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def ranks_of(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RanksOf:
    """What so many ranks recorded: one without other axes than data."""
    root = tmp_path_factory.mktemp("mesh")

    @cache
    def run(ranks: int) -> Records:
        arguments = (str(models), mesh_worker.CONTEXT, ranks == 1)
        return run_ranks(mesh_worker.trained_on_mesh, ranks, root / str(ranks), *arguments)

    return run


@pytest.mark.full
@pytest.mark.parametrize("case", mesh_worker.CONTEXT)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mesh_trains_as_one_process_does(ranks_of: RanksOf, ranks: int, case: str) -> None:
    (alone,) = (record[case] for record in ranks_of(1))
    together = [record[case] for record in ranks_of(ranks)]
    for found, expected in zip(together[0]["metrics"], alone["metrics"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert all(record["metrics"] == together[0]["metrics"] for record in together)
    assert together[0]["weights"].keys() == alone["weights"].keys()
    for name, expected in alone["weights"].items():
        torch.testing.assert_close(together[0]["weights"][name], expected, atol=1e-5, rtol=1e-5)
    for column in ("before", "after"):
        found = torch.cat([record[column] for record in together])
        torch.testing.assert_close(found, alone[column], atol=1e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_of_a_long_sequence_are_shared_out(models: Path, ranks: int, tmp_path: Path) -> None:
    (alone,) = run_ranks(mesh_worker.activations, 1, tmp_path / "alone", str(models), 1)
    shared = run_ranks(mesh_worker.activations, ranks, tmp_path / "shared", str(models), ranks)
    assert [nbytes / alone for nbytes in shared] == pytest.approx([1 / ranks] * ranks, rel=0.1)


@pytest.mark.full
def test_heads_that_cannot_be_shared_and_padded_rows_are_refused_by_name(models: Path, tmp_path: Path) -> None:
    for found in run_ranks(mesh_worker.refusals, 2, tmp_path, str(models)):
        assert re.search(says("parallel.context=2", "3 attention heads"), found["odd"])
        assert re.search(says("parallel.context=2", "train.packing=true"), found["qwen2"])


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"engine": "deepspeed"}, ["parallel.context=2", "engine=deepspeed", "train.engine=fsdp"]),
        ({"packing": False}, ["parallel.context=2", "packing=False"]),
        ({"router_aux_loss_coef": 0.1}, ["parallel.context=2", "router_aux_loss_coef=0.1"]),
        ({"context": 0}, ["parallel.context=0", 1]),
    ],
)
def test_what_cannot_share_sequences_is_named(settings: dict[str, Any], facts: list[object]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        TrainConfig(**({"engine": "fsdp", "zero_stage": 2, "context": 2} | settings))


def test_ranks_that_cannot_be_shared_out_are_refused_and_the_plan_divides_activations() -> None:
    config = TrainConfig(engine="fsdp", zero_stage=3, context=2)
    with pytest.raises(ValueError, match=says("parallel.context=2", "3 ranks")):
        config.data_ranks(3)
    size = model_size("warm_start:sort")
    assert size is not None
    with pytest.raises(ValueError, match=says("parallel.context=3", "4 attention heads")):
        learning(size, replace(config, context=3), 3, 500, 8)
    whole, halved = (learning(size, replace(config, context=n), 2, 100_000, 1).passes for n in (1, 2))
    assert whole is not None
    assert halved is not None
    assert 0.5 <= halved / whole < 0.6

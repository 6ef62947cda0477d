"""Training on meshes of ranks equals training by one process in losses, norms, weights and log-probabilities."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.models.size import model_size
from components.train.config import TrainConfig
from plugins.plan.memory import learning
from tests.components.helpers import mesh_worker
from tests.components.helpers.ranks import run_ranks
from tests.messages import says

Records = list[dict[str, Any]]
RanksOf = Callable[[int], Records]
CASES = mesh_worker.CONTEXT | mesh_worker.TENSOR | mesh_worker.BOTH
RANKS = {
    **dict.fromkeys(mesh_worker.CONTEXT, (2, 4)),
    **dict.fromkeys(mesh_worker.TENSOR, (2,)),
    "llama-tensor-3": (2, 4),
    "qwen2-both": (4,),
}
"""Case -> number of ranks."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh_models")
    mesh_worker.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def ranks_of(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RanksOf:
    """Return the records by number of ranks. One rank uses the data axis only."""
    root = tmp_path_factory.mktemp("mesh")

    @cache
    def run(ranks: int) -> Records:
        cases = CASES if ranks == 1 else {name: case for name, case in CASES.items() if ranks in RANKS[name]}
        arguments = (str(models), cases, ranks == 1)
        return run_ranks(mesh_worker.trained_on_mesh, ranks, root / str(ranks), *arguments)

    return run


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for case in CASES for ranks in RANKS[case]])
def test_training_on_a_mesh_equals_training_in_one_process(ranks_of: RanksOf, ranks: int, case: str) -> None:
    (alone,) = (record[case] for record in ranks_of(1))
    together = [record[case] for record in ranks_of(ranks)]
    for actual, expected in zip(together[0]["metrics"], alone["metrics"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert all(record["metrics"] == together[0]["metrics"] for record in together)
    assert together[0]["weights"].keys() == alone["weights"].keys()
    for name, expected in alone["weights"].items():
        torch.testing.assert_close(together[0]["weights"][name], expected, atol=1e-5, rtol=1e-5)
    for column in ("before", "after"):
        actual = torch.cat([record[column] for record in together])
        torch.testing.assert_close(actual, alone[column], atol=1e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_of_a_long_sequence_are_divided_over_ranks(models: Path, ranks: int, tmp_path: Path) -> None:
    ((alone,),) = run_ranks(mesh_worker.activations, 1, tmp_path / "alone", str(models), {})
    meshes = [{"context": ranks}, *([{"tensor": 2}] if ranks == 2 else [])]
    for context, *tensor in run_ranks(mesh_worker.activations, ranks, tmp_path / "shared", str(models), *meshes):
        assert context / alone == pytest.approx(1 / ranks, rel=0.1)
        assert [nbytes / alone for nbytes in tensor] == pytest.approx([_planned(models, 2)] * len(tensor), rel=0.1)


def _planned(models: Path, tensor: int) -> float:
    """Share of the activations that the plan expects on a rank."""
    size = model_size(str(models / "long"))
    config = TrainConfig(engine="fsdp", zero_stage=3, packing=True)
    passes = [
        learning(size, replace(config, tensor=ranks), ranks, mesh_worker.LONG, 1, has_head=False).passes
        for ranks in (1, tensor)
    ]
    assert passes[0] is not None
    assert passes[1] is not None
    return passes[1] / passes[0]


@pytest.mark.full
def test_indivisible_heads_and_padded_rows_are_refused_by_name(models: Path, tmp_path: Path) -> None:
    for messages in run_ranks(mesh_worker.refusals, 2, tmp_path, str(models)):
        assert re.search(says("parallel.context=2", "3 attention heads"), messages["odd"])
        assert re.search(says("parallel.context=2", "train.packing=true"), messages["qwen2"])
        assert re.search(says("parallel.tensor=2", "3 attention heads"), messages["odd-tensor"])
        assert re.search(says("parallel.tensor=2", "GPT2LMHeadModel", "plan"), messages["gpt2-tensor"])


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "case"), [(2, "qwen2-tensor-2"), (2, "llama-tensor-3"), (4, "llama-tensor-3")])
def test_the_memory_of_a_tensor_parallel_rank_matches_the_plan(
    models: Path, ranks_of: RanksOf, ranks: int, case: str
) -> None:
    size = model_size(str(models / CASES[case]["model"]))
    config = TrainConfig(engine="fsdp", zero_stage=3, tensor=2)
    need = learning(size, config, ranks, 64, 8)
    assert need.weights is not None
    assert need.optimizer is not None
    for record in ranks_of(ranks):
        assert record[case]["bytes"] == pytest.approx(need.weights + need.optimizer, rel=0.1)


@pytest.mark.full
def test_a_state_moves_between_a_tensor_mesh_and_one_process(models: Path, ranks_of: RanksOf, tmp_path: Path) -> None:
    saved = {f"state-{ranks}": ranks_of(ranks)[0][mesh_worker.RESUMED] for ranks in (1, 2)}
    (alone,) = run_ranks(mesh_worker.resumed, 1, tmp_path / "alone", str(models), list(saved), True)
    together = run_ranks(mesh_worker.resumed, 2, tmp_path / "together", str(models), list(saved), False)
    for state, trained in saved.items():
        for record in (alone[state], together[0][state]):
            assert record["weights"].keys() == trained["weights"].keys()
            assert all(torch.equal(record["weights"][name], weight) for name, weight in trained["weights"].items())
        assert together[0][state]["metrics"] == pytest.approx(alone[state]["metrics"], rel=1e-5, abs=1e-6)
        assert bool(alone[state]["remarks"]) == (state == "state-2")
        for ranks, record in ((1, alone[state]), (2, together[0][state])):
            exported = load_file(models / f"exported-{ranks}-{state}" / "model.safetensors")
            assert exported.keys() == record["after"].keys()
            assert all(torch.equal(exported[name], weight) for name, weight in record["after"].items())
            for name, weight in alone[state]["after"].items():
                torch.testing.assert_close(record["after"][name], weight, atol=1e-5, rtol=1e-5)


def test_indivisible_ranks_are_refused_and_the_plan_divides_activations() -> None:
    config = TrainConfig(engine="fsdp", zero_stage=3, context=2)
    with pytest.raises(ValueError, match=says("parallel.context=2", "3 ranks")):
        config.data_ranks(3)
    size = model_size("warm_start:sort")
    assert size is not None
    with pytest.raises(ValueError, match=says("parallel.context=3", "4 attention heads")):
        learning(size, replace(config, context=3), 3, 500, 8)
    with pytest.raises(ValueError, match=says("parallel.context=2 x parallel.tensor=2", "6 ranks")):
        replace(config, tensor=2).data_ranks(6)
    whole, halved = (learning(size, replace(config, context=n), 2, 100_000, 1).passes for n in (1, 2))
    assert whole is not None
    assert halved is not None
    assert 0.5 <= halved / whole < 0.6

"""Training a mixture with expert parallelism equals training by one process."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from components.models.size import ModelSize, model_size
from components.train.config import TrainConfig
from plugins.plan.memory import learning, training
from tests.components.helpers import expert_worker
from tests.components.helpers.ranks import run_ranks
from tests.messages import says

Records = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    expert_worker.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def recorded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Records of two ranks, one process and four ranks. Each loads the state that the previous run saved."""
    root = tmp_path_factory.mktemp("experts")
    states = [str(root / name) for name in ("pair", "alone")]
    return {
        "pair": run_ranks(expert_worker.pair, 2, root / "2", str(folder), states[0]),
        "alone": run_ranks(expert_worker.alone, 1, root / "1", str(folder), *states),
        "four": run_ranks(expert_worker.four, 4, root / "4", str(folder), states[1]),
    }


def without_loads(metrics: dict[str, float]) -> dict[str, float]:
    """Remove the router metrics, which each rank computes from its own micro-batches."""
    names = ("router_load_max", "router_load_min", "router_imbalance", "router_imbalance_max")
    return {name: value for name, value in metrics.items() if name not in names}


def assert_equal(records: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for metrics, other in zip(records[0]["metrics"], expected["metrics"], strict=True):
        assert without_loads(metrics) == pytest.approx(without_loads(other), rel=1e-5, abs=1e-6)
    assert all(record["metrics"] == records[0]["metrics"] for record in records)
    assert records[0]["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(records[0]["weights"][name], weight, atol=1e-5, rtol=1e-5)
    for column in ("before", "after"):
        together = torch.cat([record[column] for record in records])
        torch.testing.assert_close(together, expected[column], atol=1e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "case"), [("pair", case) for case in expert_worker.CASES] + [("four", "packed-2"), ("four", "context")]
)
def test_expert_parallel_training_equals_training_in_one_process(recorded: Records, ranks: str, case: str) -> None:
    (alone,) = recorded["alone"]
    assert_equal([record[case] for record in recorded[ranks]], alone[case])


@pytest.mark.full
def test_the_balancing_loss_does_not_depend_on_expert_parallelism(recorded: Records) -> None:
    first = recorded["pair"][0]
    for actual, expected in zip(first["balanced-2"], first["balanced"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert actual["router_aux_loss"] > 1


@pytest.mark.full
def test_memory_of_expert_parallel_ranks_matches_the_plan(folder: Path, recorded: Records) -> None:
    size = model_size(str(folder / "qwen3_moe"))
    assert size is not None
    held = [record["memory"] for record in recorded["pair"]]
    fallen = size.expert_parameters * 4 // 2
    # The tensors gathered in a step are those of a pass. The plan adds gradients, those of one layer twice.
    planned = [training(size, config(expert), 2, tokens=100).passes or 0 for expert in (1, 2)]
    assert planned[0] - planned[1] == pytest.approx(fallen + 8 * size.expert_parameters // 3 // 2, rel=0.1)
    for rank in held:
        assert rank[1]["whole"] == 4 * size.parameters
        assert rank[1]["whole"] - rank[2]["whole"] == pytest.approx(fallen, rel=0.1)
        need = training(size, config(2), 2, tokens=100)
        assert rank[2]["kept"] == pytest.approx((need.weights or 0) + (need.optimizer or 0), rel=0.1)


@pytest.mark.full
def test_a_state_moves_between_expert_parallelism_and_one_process(recorded: Records) -> None:
    (alone,), pair, four = recorded["alone"], recorded["pair"][0], recorded["four"][0]
    assert pair["remarks"] == []
    assert any("expert=2" in remark for remark in alone["remarks"])
    assert pair["resumed"] == pair["next"]
    for record in (alone["loaded"], four["loaded"]):
        assert record.keys() == pair["saved"].keys()
        assert all(torch.equal(record[name], pair["saved"][name]) for name in record)
    assert all(torch.equal(weight, pair["saved"][name]) for name, weight in alone["exported"].items())
    # The moments were restored too. Otherwise the next step would differ.
    for record in (alone["next"], four["next"]):
        assert record == pytest.approx(pair["next"], rel=1e-5, abs=1e-6)


@pytest.mark.full
def test_dense_models_and_indivisible_experts_are_refused_by_name(recorded: Records) -> None:
    for record in recorded["pair"]:
        assert re.search(says("parallel.expert=2", "Qwen3ForCausalLM"), record["refused"]["dense"])
        assert re.search(says("parallel.expert=2", "5 experts"), record["refused"]["five"])


def config(expert: int, **settings: Any) -> TrainConfig:
    return TrainConfig(**({"engine": "fsdp", "zero_stage": 2, "expert": expert} | settings))


def test_a_plan_refuses_indivisible_ranks_and_experts() -> None:
    with pytest.raises(ValueError, match=says("parallel.expert=2", "3 ranks")):
        config(2).data_ranks(3)
    assert config(2).data_ranks(4) == 4
    dense = ModelSize(parameters=100, layers=1, hidden=4, heads=1, queries=4, keys=4)
    with pytest.raises(ValueError, match=says("parallel.expert=2", "no experts")):
        learning(dense, config(2), 2, 10, 4)
    mixture = ModelSize(parameters=100, layers=1, hidden=4, heads=1, queries=4, keys=4, experts=6, mixtures=1)
    with pytest.raises(ValueError, match=says("parallel.expert=4", "6 experts")):
        learning(mixture, config(4), 4, 10, 4)

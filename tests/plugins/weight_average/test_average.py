"""The moving average, calculated by hand and by a slow loop, and in real engines on one rank and on two."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from plugins.weight_average.average import WeightAverage
from tests.components.helpers import train_worker as worker
from tests.components.helpers.ranks import NIGHTLY_ON_TWO, run_ranks
from tests.messages import says


def test_the_average_of_two_steps_equals_a_calculation_by_hand() -> None:
    average = WeightAverage(0.75, [("a", torch.tensor([4.0, -2.0])), ("b", torch.tensor([[1.0]]))])
    assert average.tensors["a"].tolist() == [4.0, -2.0]
    average.update([("a", torch.tensor([8.0, -2.0])), ("b", torch.tensor([[0.0]]))])
    # 8 / 4 + 4 * 3 / 4 = 5. A constant weight stays equal. 0 / 4 + 1 * 3 / 4 = 0.75
    assert average.tensors["a"].tolist() == [5.0, -2.0]
    assert average.tensors["b"].tolist() == [[0.75]]
    average.update([("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor([[-4.0]]))])
    # 1 / 4 + 5 * 3 / 4 = 4; 2 / 4 - 2 * 3 / 4 = -1; -4 / 4 + 0.75 * 3 / 4 = -0.4375
    assert average.tensors["a"].tolist() == [4.0, -1.0]
    assert average.tensors["b"].tolist() == [[-0.4375]]


def scalar_average(beta: float, values: list[float]) -> float:
    """p_ema = (1 - b) * p + b * p_ema after each step, from the first value."""
    average = values[0]
    for value in values[1:]:
        average = (1 - beta) * value + beta * average
    return average


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    beta=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.992, 0.9999]),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    steps=st.integers(0, 6),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_average_equals_a_scalar_loop(
    seed: int, beta: float, sizes: list[int], steps: int, scale: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    names = [f"layer.{i}" for i in range(len(sizes))]
    history = [
        {n: (torch.randn(size, generator=generator) * scale).to(dtype) for n, size in zip(names, sizes, strict=True)}
        for _ in range(steps + 1)
    ]
    average = WeightAverage(beta, history[0].items())
    for parameters in history[1:]:
        average.update(iter(parameters.items()))
    assert list(average.tensors) == names
    for name in names:
        columns = zip(*(parameters[name].tolist() for parameters in history), strict=True)
        expected = torch.tensor([scalar_average(beta, list(values)) for values in columns], dtype=torch.float32)
        # Each step rounds a few times, each time by at most 6e-8 of the largest value so far.
        torch.testing.assert_close(average.tensors[name], expected, rtol=1e-6, atol=4e-6 * scale)


@settings(max_examples=60, deadline=None)
@given(beta=st.floats(0, 1, exclude_max=True), value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_weight_that_never_changes_is_its_own_average_exactly(beta: float, value: float) -> None:
    average = WeightAverage(beta, [("frozen", torch.tensor([value]))])
    for _ in range(3):
        average.update([("frozen", torch.tensor([value]))])
    assert average.tensors["frozen"].tolist() == [value]


def test_a_decay_of_0_keeps_the_weights_themselves() -> None:
    average = WeightAverage(0.0, [("a", torch.tensor([1e30, 3.0]))])
    average.update([("a", torch.tensor([0.1, -1e-30]))])
    assert torch.equal(average.tensors["a"], torch.tensor([0.1, -1e-30]))


def test_a_nan_stays_where_it_is() -> None:
    average = WeightAverage(0.5, [("a", torch.zeros(3)), ("b", torch.zeros(1))])
    average.update([("a", torch.tensor([2.0, float("nan"), 4.0])), ("b", torch.ones(1))])
    assert average.tensors["a"][[0, 2]].tolist() == [1.0, 2.0]
    assert average.tensors["a"].isnan().tolist() == [False, True, False]
    assert average.tensors["b"].tolist() == [0.5]


def test_averaging_copies_the_parameters_and_does_not_change_them() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    average = WeightAverage(0.5, [("a", parameter)])
    with torch.no_grad():
        parameter.fill_(4.0)
    assert average.tensors["a"].tolist() == [1.0, 2.0]
    average.restart([("a", parameter)])
    average.update([("a", torch.nn.Parameter(torch.zeros(2)))])
    assert average.tensors["a"].tolist() == [2.0, 2.0]
    assert parameter.tolist() == [4.0, 4.0]
    assert not average.tensors["a"].requires_grad


class Run(NamedTuple):
    folder: Path
    ranks: list[dict[str, Any]]


RunOf = Callable[[int], Run]
"""Return the records of the run with this number of ranks."""


@pytest.fixture(scope="module")
def run_of(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    root = tmp_path_factory.mktemp("average")

    @cache
    def run(world_size: int) -> Run:
        folder = root / str(world_size)
        return Run(folder, run_ranks(worker.average_weights, world_size, folder, str(tied_model), root, folder))

    return run


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", worker.AVERAGED)
def test_an_engine_averages_the_weights_of_each_step(run_of: RunOf, world_size: int, case: str) -> None:
    """Compared with the formula in float64 over 5 steps. bfloat16 weights would differ by 1e-3, so the master weights
    are averaged.
    """
    record = run_of(world_size).ranks[0][case]
    assert equal(record["start"]["average"], record["start"]["masters"])
    expected = {name: weight.double() for name, weight in record["start"]["masters"].items()}
    assert len(record["steps"]) == 5
    assert len(expected) == 26
    for step in record["steps"]:
        assert step["average"].keys() == expected.keys()
        for name, weight in step["masters"].items():
            expected[name] = (1 - worker.EMA_BETA) * weight.double() + worker.EMA_BETA * expected[name]
            assert step["average"][name].dtype == torch.float32
            torch.testing.assert_close(step["average"][name].double(), expected[name], rtol=1e-6, atol=1e-7)
            assert not torch.equal(step["average"][name], weight)


@pytest.mark.full
@pytest.mark.parametrize("case", worker.AVERAGED)
def test_only_rank_0_has_the_average(run_of: RunOf, case: str) -> None:
    assert [len(rank[case]["steps"][-1]["average"]) for rank in run_of(2).ranks] == [26, 0]


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", worker.AVERAGED)
def test_the_saved_model_has_the_average_and_the_live_weights_stay(run_of: RunOf, world_size: int, case: str) -> None:
    record = run_of(world_size).ranks[0][case]
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    saved = load_file(run_of(world_size).folder / f"hf-{case}" / "model.safetensors")
    last = record["steps"][-1]
    assert equal(saved, {name: tensor.to(dtype) for name, tensor in last["average"].items()})
    assert equal(record["weights"], {name: tensor.to(dtype) for name, tensor in last["masters"].items()})


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", worker.AVERAGED)
def test_a_loaded_state_continues_its_average_bit_equal(run_of: RunOf, world_size: int, case: str) -> None:
    record = run_of(world_size).ranks[0][case]
    assert record["inexact"] == []
    assert equal(record["loaded"], record["steps"][worker.HALF - 1]["average"])
    for resumed, step in zip(record["resumed"], record["steps"][worker.HALF :], strict=True):
        assert resumed["metrics"] == step["metrics"]
        assert equal(resumed["masters"], step["masters"])
        assert equal(resumed["average"], step["average"])


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
def test_another_zero_stage_continues_with_the_same_average(run_of: RunOf, world_size: int) -> None:
    record = run_of(world_size).ranks[0]
    (remark,) = record["other_stage"]["inexact"]
    assert re.findall(r"zero_stage=(\d)", remark) == ["2", "3"]
    assert equal(record["other_stage"]["average"], record["fp32-2"]["steps"][worker.HALF - 1]["average"])


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
def test_an_engine_without_an_average_trains_the_same_and_saves_its_weights(run_of: RunOf, world_size: int) -> None:
    for rank in run_of(world_size).ranks:
        (remark,) = rank["without"]["inexact"]
        assert "average" in remark
    record = run_of(world_size).ranks[0]
    for step, averaged in zip(record["without"]["steps"], record["bf16-2"]["steps"][worker.HALF :], strict=True):
        assert step["metrics"] == averaged["metrics"]
        assert equal(step["masters"], averaged["masters"])
    saved = load_file(run_of(world_size).folder / "hf-without" / "model.safetensors")
    assert equal(saved, record["bf16-2"]["weights"])


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
def test_an_average_starts_from_the_masters_of_a_state_that_has_none(run_of: RunOf, world_size: int) -> None:
    for rank in run_of(world_size).ranks:
        (remark,) = rank["anew"]["inexact"]
        assert "average" in remark
    record = run_of(world_size).ranks[0]
    assert equal(record["anew"]["average"], record["without"]["steps"][-1]["masters"])


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
def test_a_state_with_an_incomplete_average_is_refused(run_of: RunOf, world_size: int) -> None:
    for rank in run_of(world_size).ranks:
        errors = rank["errors"]
        assert re.search(says("average.safetensors", "engine.json"), errors["missing"])
        assert re.search(says("average.safetensors", "cut_short"), errors["cut_short"])
        assert re.search(says("average.safetensors", "model.embed_tokens.weight", None), errors["of_another"])


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
def test_a_step_that_fails_is_not_averaged(run_of: RunOf, world_size: int) -> None:
    """One good step from the state whose average equals the weights, then one with an infinite gradient."""
    record = run_of(world_size).ranks[0]
    assert "grad_norm=" in record["failed"]["message"]
    for name, weight in record["failed"]["masters"].items():
        expected = (1 - worker.EMA_BETA) * weight.double() + worker.EMA_BETA * record["anew"]["average"][name].double()
        torch.testing.assert_close(record["failed"]["average"][name].double(), expected, rtol=1e-6, atol=1e-7)

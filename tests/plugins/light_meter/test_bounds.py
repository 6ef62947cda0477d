"""Bounds of the phases on a machine with round numbers."""

from dataclasses import replace
from typing import Any

import pytest

from plugins.light_meter.bounds import Limits
from plugins.light_meter.work import Lengths
from tests.plugins.light_meter.conftest import RoundSpeed

LENGTHS = Lengths.assumed(prompts=8, samples=4, prompt=5, response=10, longest=16)


def test_each_phase_of_a_step_has_a_bound(config: Any) -> None:
    limits = Limits.of_run(config, RoundSpeed(), threads=1)
    names = ["generate", "reward", "logprobs", "train", "sync", "other", "step", "checkpoint"]
    took = dict.fromkeys(names, 1.0)
    bounds = limits.bounds(LENGTHS, took)
    assert set(bounds) == {"generate", "logprobs", "train", "sync", "checkpoint"}
    assert min(bounds.values()) > 0
    # Three times the products of the log-probs, and the optimizer.
    assert bounds["train"] > 3 * bounds["logprobs"]


def test_generation_is_bound_by_memory_if_there_are_few_rows_and_by_products_if_there_are_many(config: Any) -> None:
    limits = Limits.of_run(config, RoundSpeed(), threads=1)
    decode = limits.work["generate"][0]
    weights = 4 * decode.size.parameters / 1e9
    one = Lengths.assumed(prompts=1, samples=1, prompt=5, response=10, longest=10)
    assert limits.seconds(decode, one) == pytest.approx(10 * weights, rel=0.1)
    many = Lengths.assumed(prompts=10_000, samples=1, prompt=5, response=10, longest=10)
    assert limits.seconds(decode, many) == pytest.approx(decode.operations(many) / 1e9)


@pytest.mark.parametrize(("engine", "width"), [("hf", 4), ("vllm", 2)])
def test_weights_of_an_autocast_run_have_the_width_of_the_engine(config: Any, engine: str, width: int) -> None:
    train = replace(config.train, precision="bf16_autocast")
    config = replace(config, train=train, rollout=replace(config.rollout, engine=engine))
    assert Limits.of_run(config, RoundSpeed(), threads=1).width == width


def test_bound_of_the_weight_sync_is_two_copies_of_the_weights(config: Any) -> None:
    limits = Limits.of_run(config, RoundSpeed(), threads=1)
    parameters = limits.work["generate"][0].size.parameters
    assert limits.bounds(LENGTHS, {"sync": 1.0})["sync"] == pytest.approx(8 * parameters / 1e9)


def test_more_threads_lower_the_bound_of_products(config: Any) -> None:
    slow, fast = (Limits.of_run(config, RoundSpeed(), threads).bounds(LENGTHS, {"logprobs": 1.0}) for threads in (1, 4))
    assert slow["logprobs"] == pytest.approx(4 * fast["logprobs"])

"""Options that exclude generation ahead of training."""

import re
from typing import Literal

import pytest

from plugins.generation_ahead.options import faults
from tests.messages import says
from training.options.async_options import AsyncOptions
from training.options.data_options import DataOptions
from training.options.model_options import ModelOptions
from training.options.placement_options import PlacementOptions
from training.options.rl_options import RLOptions


def faults_of(options: AsyncOptions, colocated: bool, backend: Literal["ray", "local"]) -> list[str]:
    """Return the faults of these options in a run with four prompts per step."""
    model = ModelOptions(path="warm_start:sort")
    config = RLOptions(prompts_per_step=4, model=model, data=DataOptions(path="task:sort"))
    config.asynchronous = options
    config.backend = backend
    config.placement = PlacementOptions(colocate=colocated)
    return list(faults(config))


def test_concurrent_generation_and_training_need_separate_devices_and_processes() -> None:
    ahead = AsyncOptions(enabled=True)
    assert faults_of(ahead, False, "ray") == []
    (fault,) = faults_of(ahead, True, "ray")
    assert re.search(says("placement.colocate=false"), fault)
    (fault,) = faults_of(ahead, False, "local")
    assert re.search(says("backend=local", "backend=ray"), fault)
    # Without a queue the roles work in turn, as without the option.
    assert faults_of(AsyncOptions(enabled=True, queue_size=0), True, "local") == []


@pytest.mark.parametrize(("count", "fits"), [(4, False), (5, True), (8, True), (9, False)])
def test_prompts_in_flight_exceed_one_step_and_are_at_most_two(count: int, fits: bool) -> None:
    options = AsyncOptions(enabled=True, partial_rollout=True, in_flight_prompts=count)
    faults = faults_of(options, False, "ray")
    assert len(faults) == (0 if fits else 1)
    assert all(re.search(says(f"in_flight_prompts={count}", 5, 8, "4 prompts"), fault) for fault in faults)

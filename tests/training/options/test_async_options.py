"""Valid combinations of the settings of asynchronous training."""

import re
from typing import Any

import pytest

from tests.messages import says
from training.options.async_options import AsyncOptions


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"partial_rollout": True}, ["asynchronous.partial_rollout", "asynchronous.enabled"]),
        ({"in_flight_prompts": 3}, ["asynchronous.in_flight_prompts", "asynchronous.enabled"]),
        ({"enabled": True, "in_flight_prompts": 3}, ["in_flight_prompts", "asynchronous.partial_rollout=true"]),
        ({"enabled": True, "partial_rollout": True, "queue_size": 0}, ["partial_rollout", "queue_size=1"]),
        ({"queue_size": -1}, ["asynchronous.queue_size=-1", 0]),
    ],
)
def test_settings_without_effect_on_their_own_are_refused(options: dict[str, Any], facts: list[object]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        AsyncOptions(**options)


def test_the_maximum_staleness_is_the_queue_size_plus_1_with_partial_rollouts() -> None:
    assert (AsyncOptions(queue_size=5).ahead, AsyncOptions(queue_size=5).most_stale) == (0, 0)
    partial = {"enabled": True, "queue_size": 2, "partial_rollout": True}
    assert (AsyncOptions(**partial).ahead, AsyncOptions(**partial).most_stale) == (2, 2)
    assert AsyncOptions(**partial, in_flight_prompts=3).most_stale == 3


def test_training_on_stale_responses_without_a_correction_gives_a_note() -> None:
    ahead = AsyncOptions(enabled=True, queue_size=2)
    (note,) = ahead.notes("correction=tis", False)
    assert re.search(says(" 2 ", "correction=tis"), note)
    assert ahead.notes("correction=tis", True) == []
    assert AsyncOptions(enabled=True, queue_size=0).notes("correction=tis", False) == []

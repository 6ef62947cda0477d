"""Futures: what can be done with answers that are on their way, on Ray and in local mode alike."""

import time
from pathlib import Path
from typing import Any

import pytest
import workers
from groups import ON_RAY, group_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core import FutureSequence, RoleGroup
from tests.messages import says

EVERY_EXAMPLE_CALLS = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@EVERY_EXAMPLE_CALLS
@given(
    values=st.lists(st.integers(-5, 5), max_size=12),
    count=st.sampled_from([1, 2, 3]),
    index=st.integers(-13, 13),
    cut=st.slices(12),
)
def test_a_future_sequence_is_the_sequence_of_its_items(
    echoes: None, values: list[int], count: int, index: int, cut: slice
) -> None:
    doubled = [2 * value for value in values]
    sequence = group_of(count).call_batch(workers.doubled, len(values), values)
    assert isinstance(sequence, FutureSequence)
    assert len(sequence) == len(doubled)
    if -len(doubled) <= index < len(doubled):
        assert sequence[index] == doubled[index]
    else:
        with pytest.raises(IndexError, match=says(index, len(doubled))):
            sequence[index]
    assert sequence[cut] == doubled[cut]
    assert list(sequence) == doubled
    assert list(reversed(sequence)) == doubled[::-1]
    assert (4 in sequence) == (4 in doubled)
    assert sequence.result() == doubled
    assert sequence.done()


@ON_RAY
def test_items_come_as_soon_as_their_worker_has_them(actors: RoleGroup[Any], gate: Path) -> None:
    open_gate = gate.with_name("open")
    open_gate.touch()
    sequence = actors.call_batch("held_each", 3, [open_gate, open_gate, gate])
    items = iter(sequence)
    assert (next(items), next(items)) == ("open", "open")
    assert not sequence.done()
    with pytest.raises(TimeoutError, match=says("0.1 s", "ACTOR.held_each", "rank 2")):
        sequence.result(0.1)
    gate.touch()
    assert next(items) == "gate"


def test_a_worker_that_does_not_return_one_item_for_each_is_named(actors: RoleGroup[Any]) -> None:
    sequence = actors.call_batch("too_many", 3, [1, 2, 3])
    with pytest.raises(ValueError, match=says("ACTOR-0.too_many", "1 item", "list", "length 2")):
        list(sequence)


def test_asking_again_and_again_whether_it_is_done_comes_to_an_end(actors: RoleGroup[Any]) -> None:
    future, deadline = actors.call("echo", 1), time.monotonic() + 60
    while not future.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert future.result() == [(0, 1), (1, 1), (2, 1)]


async def _awaited(actors: RoleGroup[Any]) -> object:
    return await actors.call_batch(workers.doubled, 3, [1, 2, 3])


def test_a_sequence_can_be_awaited(actors: RoleGroup[Any]) -> None:
    import asyncio

    assert asyncio.run(_awaited(actors)) == [2, 4, 6]


async def _many(actors: RoleGroup[Any], solo: RoleGroup[Any], gate: Path) -> list[Any]:
    import asyncio

    waiting = [asyncio.ensure_future(_awaited_one(actors.held(gate))) for _ in range(40)]
    await asyncio.sleep(0)
    await solo.call("echo", 1)  # all forty wait meanwhile
    gate.touch()
    return await asyncio.gather(*waiting)


async def _awaited_one(future: Any) -> Any:
    return await future


@ON_RAY
def test_those_that_await_do_not_keep_others_from_awaiting(
    actors: RoleGroup[Any], solo: RoleGroup[Any], gate: Path
) -> None:
    import asyncio

    assert asyncio.run(_many(actors, solo, gate)) == [[0, 1, 2]] * 40

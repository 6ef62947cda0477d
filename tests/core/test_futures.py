"""Futures of group calls, on Ray and in local mode."""

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
def test_a_future_sequence_behaves_as_the_list_of_its_items(
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
def test_items_are_available_as_soon_as_their_worker_has_returned(actors: RoleGroup[Any], gate: Path) -> None:
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


def test_a_result_of_wrong_length_raises_an_error_that_names_the_worker(actors: RoleGroup[Any]) -> None:
    sequence = actors.call_batch("too_many", 3, [1, 2, 3])
    with pytest.raises(ValueError, match=says("ACTOR-0.too_many", "1 item", "list", "length 2")):
        list(sequence)


def test_polling_done_becomes_true(actors: RoleGroup[Any]) -> None:
    future = actors.call("echo", 1)
    deadline = time.monotonic() + 60
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
    await solo.call("echo", 1)  # while all 40 futures are awaited
    gate.touch()
    return await asyncio.gather(*waiting)


async def _awaited_one(future: Any) -> Any:
    return await future


@ON_RAY
def test_many_futures_can_be_awaited_concurrently(actors: RoleGroup[Any], solo: RoleGroup[Any], gate: Path) -> None:
    import asyncio

    assert asyncio.run(_many(actors, solo, gate)) == [[0, 1, 2]] * 40

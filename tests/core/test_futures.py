"""Futures: what can be done with answers that are on their way, on Ray and in local mode alike."""

import queue
import time
from pathlib import Path

import pytest
import workers
from groups import ON_RAY, group_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core import FutureSequence, RoleGroup, as_completed
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
    sequence.wait(60)
    assert sequence.done()


@ON_RAY
def test_items_come_as_soon_as_their_worker_has_them(actors: RoleGroup, gate: Path) -> None:
    open_gate = gate.with_name("open")
    open_gate.touch()
    sequence = actors.call_batch("held_each", 3, [open_gate, open_gate, gate])
    items = iter(sequence)
    assert (next(items), next(items)) == ("open", "open")
    assert not sequence.done()
    with pytest.raises(TimeoutError, match=says("0.1 s", "ACTOR.held_each", "rank 2")):
        sequence.wait(0.1)
    gate.touch()
    assert next(items) == "gate"


def test_a_worker_that_does_not_return_one_item_for_each_is_named(actors: RoleGroup) -> None:
    sequence = actors.call_batch("too_many", 3, [1, 2, 3])
    with pytest.raises(ValueError, match=says("ACTOR-0.too_many", "1 item", "list", "length 2")):
        list(sequence)


@ON_RAY
def test_as_completed_gives_futures_in_the_order_in_which_they_end(echoes: None, gate: Path) -> None:
    held, quick, failing = RoleGroup("two").held(gate), RoleGroup("actor").slow(0.0), RoleGroup("solo").call("fail", 0)
    ended = as_completed([held, quick, failing])
    assert {next(ended), next(ended)} == {quick, failing}
    gate.touch()
    assert [*ended] == [held]
    assert quick.result() == [0, 1, 2]
    with pytest.raises(KeyError):
        failing.result()


def test_as_completed_gives_each_future_once_whoever_is_first(echoes: None) -> None:
    futures = [RoleGroup("two").slow(0.05), RoleGroup("actor").slow(0.0), RoleGroup("actor").call("echo", 1)]
    found = [*as_completed(futures)]
    assert sorted(map(id, found)) == sorted(map(id, futures))
    assert [*as_completed([])] == []
    assert all(future.done() for future in found)


@ON_RAY
def test_as_completed_has_a_time_limit(actors: RoleGroup, gate: Path) -> None:
    future = actors.held(gate)
    with pytest.raises(TimeoutError, match=says(1, "0.1 s", "ACTOR.held")):
        list(as_completed([future], timeout=0.1))
    gate.touch()
    future.result()


def test_a_callback_is_called_once_with_the_future_also_when_it_fails(actors: RoleGroup) -> None:
    told: queue.Queue[object] = queue.Queue()
    good, bad = actors.slow(0.05), actors.call("fail", 0)
    good.add_done_callback(told.put)
    bad.add_done_callback(told.put)
    assert {told.get(timeout=60), told.get(timeout=60)} == {good, bad}
    assert good.result() == [0, 1, 2]
    with pytest.raises(KeyError, match="lost in rank 0"):
        bad.result()
    assert told.empty()


@ON_RAY
def test_a_callback_does_not_hold_up_a_wait_with_a_limit(actors: RoleGroup, gate: Path) -> None:
    told: queue.Queue[object] = queue.Queue()
    future = actors.held(gate)
    future.add_done_callback(told.put)
    with pytest.raises(TimeoutError, match=says("0.1 s", "ACTOR.held")):
        future.result(0.1)
    assert told.empty()
    gate.touch()
    assert told.get(timeout=60) is future


def test_asking_again_and_again_whether_it_is_done_comes_to_an_end(actors: RoleGroup) -> None:
    future, deadline = actors.call("echo", 1), time.monotonic() + 60
    while not future.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert future.result() == [(0, 1), (1, 1), (2, 1)]


async def _awaited(actors: RoleGroup) -> object:
    return await actors.call_batch(workers.doubled, 3, [1, 2, 3])


def test_a_sequence_can_be_awaited(actors: RoleGroup) -> None:
    import asyncio

    assert asyncio.run(_awaited(actors)) == [2, 4, 6]

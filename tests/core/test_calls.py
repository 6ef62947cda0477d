"""What a call through a role group means: what is split, what returns, how long it waits, how it fails."""

import time

import numpy as np
import pytest
import workers

import core.futures
from core import FutureSequence, RoleGroup, replicate


def test_a_list_is_cut_into_chunks_that_differ_by_at_most_one(actors: RoleGroup) -> None:
    assert actors.echo([1, 2, 3, 4, 5, 6, 7]) == [(0, [1, 2, 3]), (1, [4, 5]), (2, [6, 7])]


def test_what_cannot_be_split_goes_whole_to_everybody_beside_what_can(actors: RoleGroup) -> None:
    answer = actors.echo([1, 2, 3], 5, "ab", (7, 8), {"k": [1]}, None)
    assert answer == [(rank, [rank + 1], 5, "ab", (7, 8), {"k": [1]}, None) for rank in range(3)]


def test_keyword_arguments_are_split_by_the_same_rule(actors: RoleGroup) -> None:
    assert actors.echo(x=[1, 2, 3], y="whole") == [(0, [1], "whole"), (1, [2], "whole"), (2, [3], "whole")]


def test_a_list_of_one_stays_a_list(solo: RoleGroup) -> None:
    assert solo.echo([7]) == [(0, [7])]


def test_arrays_are_split_along_their_first_axis_and_scalars_are_not(actors: RoleGroup) -> None:
    answer = actors.echo(np.arange(8).reshape(4, 2), np.float64(1.5))
    assert [part.tolist() for _, part, _ in answer] == [[[0, 1], [2, 3]], [[4, 5]], [[6, 7]]]
    assert [number for _, _, number in answer] == [1.5, 1.5, 1.5]


def test_a_method_may_have_the_name_of_a_method_of_lists(actors: RoleGroup) -> None:
    assert actors.count([1, 2, 3, 4]) == [2, 1, 1]
    assert [member.name for member in actors] == ["ACTOR-0", "ACTOR-1", "ACTOR-2"]
    assert (len(actors), actors[-1].rank) == (3, 2)


def test_replicate_sends_a_list_whole(actors: RoleGroup) -> None:
    assert actors.echo(replicate([1, 2])) == [(rank, [1, 2]) for rank in range(3)]


def test_auto_shard_off_sends_a_list_whole(actors: RoleGroup) -> None:
    assert actors.echo_whole([1, 2, 3]) == [[1, 2, 3]] * 3


def test_lengths_that_differ_are_refused_by_name(actors: RoleGroup) -> None:
    with pytest.raises(ValueError, match=r"ACTOR.echo: .*argument 0 has 3, extra has 2"):
        actors.echo([1, 2, 3], extra=[1, 2])


def test_workers_without_an_item_are_not_called(actors: RoleGroup) -> None:
    assert actors.echo([1, 2]) == [(0, [1]), (1, [2])]


def test_ranks_that_enter_collectives_together_are_never_left_without_an_item(ranks: RoleGroup) -> None:
    with pytest.raises(ValueError, match="1 items for 2 ranks"):
        ranks.echo([1])


def test_rank0_gets_the_list_whole_and_returns_its_single_value(actors: RoleGroup) -> None:
    assert actors.echo_rank0([1, 2, 3]) == [1, 2, 3]


def test_a_call_that_does_not_block_returns_a_future(actors: RoleGroup) -> None:
    future = actors.slow(0.3)
    assert not future.done()
    assert future.result() == [0, 1, 2]
    assert future.done()


def test_workers_work_at_the_same_time(actors: RoleGroup) -> None:
    began = time.monotonic()
    assert actors.slow(0.6).result() == [0, 1, 2]
    assert time.monotonic() - began < 1.2  # one after the other would take 1.8


def test_a_timeout_covers_all_targets_and_names_the_missing_rank(ranks: RoleGroup) -> None:
    with pytest.raises(TimeoutError, match=r"after 0.5 s from CRITIC.slow_on_rank1 on rank 1$"):
        ranks.slow_on_rank1()


def test_pre_func_changes_what_is_sent_and_post_func_what_returns(actors: RoleGroup) -> None:
    assert actors.not_negative(-5) == 0
    assert actors.not_negative(5) == 15


def test_an_error_keeps_its_type_and_names_who_raised_it_and_who_failed_too(actors: RoleGroup) -> None:
    with pytest.raises(KeyError, match="lost in rank 1") as caught:
        actors.fail(1)
    notes = caught.value.__notes__
    assert "raised by ACTOR-1 in fail" in notes
    assert "ACTOR-2 failed too: KeyError('lost in rank 2')" in notes
    assert any("workers.py" in note and "raise KeyError" in note for note in notes)


def test_a_wrong_name_is_answered_with_the_right_ones(actors: RoleGroup) -> None:
    with pytest.raises(AttributeError, match=r"no method .eco. to call; it has .*echo"):
        actors.eco()


def test_a_method_neither_decorated_nor_bound_cannot_be_called(actors: RoleGroup) -> None:
    with pytest.raises(AttributeError, match="hidden"):
        actors.hidden()
    with pytest.raises(AttributeError, match="hidden"):
        actors.call("hidden")


def test_a_role_that_the_job_lacks_is_an_error_unless_optional(three_workers: None) -> None:
    with pytest.raises(ValueError, match=r"no role TOOL; it has .*ACTOR"):
        RoleGroup("tool")
    assert len(RoleGroup("tool", optional=True)) == 0


def test_a_stub_is_the_name_of_what_it_calls(three_workers: None) -> None:
    assert workers.whole([1, 2]) == [[1, 2]] * 3
    assert workers.first_only() == 10


def test_call_batch_gives_the_sequence_of_all_items(three_workers: None) -> None:
    sequence = workers.doubled([1, 2, 3, 4, 5])
    assert isinstance(sequence, FutureSequence)
    assert len(sequence) == 5
    assert (sequence[0], sequence[-1], sequence[1:4], list(sequence)) == (2, 10, [4, 6, 8], [2, 4, 6, 8, 10])
    assert sequence.result() == [2, 4, 6, 8, 10]


def test_call_batch_with_fewer_items_than_workers_is_right(three_workers: None) -> None:
    assert workers.doubled([4]).result() == [8]
    with pytest.raises(IndexError):
        workers.doubled([4])[1]


def test_call_batch_refuses_a_size_that_its_arguments_have_not(actors: RoleGroup) -> None:
    with pytest.raises(ValueError, match="size is 3, but an argument has 2 items"):
        actors.call_batch(workers.doubled, 3, [1, 2])


def test_every_worker_knows_who_it_is(ranks: RoleGroup, actors: RoleGroup) -> None:
    (role, rank, world, local, port, threads, colour, master_port), second = ranks.identity()
    assert (role, rank, world, local, threads, colour) == ("CRITIC", 0, 2, 0, "1", "blue")
    assert second[:4] == ("CRITIC", 1, 2, 1)
    assert port == second[4] > 0
    assert master_port == str(port)
    assert actors.identity()[2][:3] == ("ACTOR", 2, 3)
    assert actors.identity()[2][6] == "red"


def test_calls_to_one_worker_run_in_the_order_they_were_made(solo: RoleGroup) -> None:
    first, second = solo.slow(0.3), solo.call("echo", "after")
    assert second.result() == [(0, "after")]
    assert first.done()


def test_a_long_wait_says_whom_it_is_waiting_for(
    actors: RoleGroup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core.futures, "FIRST_REPORT_AFTER_S", 0.1)
    actors.slow(0.5).result()
    assert "has waited 0 s for ACTOR.slow on ranks 0, 1, 2" in capsys.readouterr().out


async def _gather(actors: RoleGroup) -> tuple[object, object]:
    return await actors.slow(0.1), await actors.call("echo", 1)


def test_futures_can_be_awaited(actors: RoleGroup) -> None:
    import asyncio

    assert asyncio.run(_gather(actors)) == ([0, 1, 2], [(0, 1), (1, 1), (2, 1)])

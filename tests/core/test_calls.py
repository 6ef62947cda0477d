"""Calls through a role group: splitting, results, waiting and errors."""

import re
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workers
from groups import ON_RAY, group_of

import core.futures
from components.batch import Batch
from core import FutureSequence, RoleGroup, WorkerTimeout, replicate
from core.backends import BackendName
from core.context import current
from tests.messages import says


def test_a_list_is_cut_into_chunks_that_differ_by_at_most_one(actors: RoleGroup[Any]) -> None:
    assert actors.echo([1, 2, 3, 4, 5, 6, 7]) == [(0, [1, 2, 3]), (1, [4, 5]), (2, [6, 7])]


def test_arguments_that_cannot_be_split_are_sent_whole_to_every_worker(actors: RoleGroup[Any]) -> None:
    results = actors.echo([1, 2, 3], 5, "ab", (7, 8), {"k": [1]}, None)
    assert results == [(rank, [rank + 1], 5, "ab", (7, 8), {"k": [1]}, None) for rank in range(3)]


def test_keyword_arguments_are_split_by_the_same_rule(actors: RoleGroup[Any]) -> None:
    assert actors.echo(x=[1, 2, 3], y="whole") == [(0, [1], "whole"), (1, [2], "whole"), (2, [3], "whole")]


def test_a_list_of_one_item_stays_a_list(solo: RoleGroup[Any]) -> None:
    assert solo.echo([7]) == [(0, [7])]


def test_arrays_are_split_along_their_first_axis_and_scalars_are_not(actors: RoleGroup[Any]) -> None:
    results = actors.echo(np.arange(8).reshape(4, 2), np.float64(1.5))
    assert [part.tolist() for _, part, _ in results] == [[[0, 1], [2, 3]], [[4, 5]], [[6, 7]]]
    assert [number for _, _, number in results] == [1.5, 1.5, 1.5]


def test_a_method_may_have_the_name_of_a_list_method(actors: RoleGroup[Any]) -> None:
    assert actors.count([1, 2, 3, 4]) == [2, 1, 1]
    assert [member.name for member in actors] == ["ACTOR-0", "ACTOR-1", "ACTOR-2"]
    assert (len(actors), actors[-1].rank) == (3, 2)


def test_replicate_sends_a_list_whole(actors: RoleGroup[Any]) -> None:
    assert actors.echo(replicate([1, 2])) == [(rank, [1, 2]) for rank in range(3)]


def test_replicate_sends_a_list_whole_beside_one_that_is_split(actors: RoleGroup[Any]) -> None:
    results = actors.echo([1, 2, 3], replicate([4, 5]), extra=replicate([6, 7, 8]))
    assert results == [(rank, [rank + 1], [4, 5], [6, 7, 8]) for rank in range(3)]


def test_auto_shard_false_sends_a_list_whole(actors: RoleGroup[Any]) -> None:
    assert actors.echo_whole([1, 2, 3]) == [[1, 2, 3]] * 3


def test_arguments_of_different_lengths_raise_an_error_that_names_them(actors: RoleGroup[Any]) -> None:
    with pytest.raises(ValueError, match=says("ACTOR.echo", "argument 0 has 3", "extra has 2")):
        actors.echo([1, 2, 3], extra=[1, 2])


def test_workers_without_an_item_are_not_called(actors: RoleGroup[Any]) -> None:
    assert actors.echo([1, 2]) == [(0, [1]), (1, [2])]


@ON_RAY
def test_fewer_items_than_ranks_of_a_train_role_raise_an_error(ranks: RoleGroup[Any]) -> None:
    with pytest.raises(ValueError, match=says("CRITIC.echo", "1 item", "2 ranks")):
        ranks.echo([1])


@ON_RAY
def test_ranks_may_be_idle_in_an_idempotent_call(ranks: RoleGroup[Any]) -> None:
    assert ranks.echo_alone([1]) == [(0, [1])]
    assert ranks.echo_alone([1, 2, 3]) == [(0, [1, 2]), (1, [3])]


def test_target_rank0_sends_the_list_whole_and_returns_a_single_value(actors: RoleGroup[Any]) -> None:
    assert actors.echo_rank0([1, 2, 3]) == [1, 2, 3]


def test_a_nonblocking_call_returns_a_future(actors: RoleGroup[Any], gate: Path, backend: BackendName) -> None:
    future = actors.held(gate)
    assert future.done() is (backend == "local")  # in local mode the call has run already
    gate.touch()
    assert future.result() == [0, 1, 2]
    assert future.done()


@ON_RAY
def test_workers_run_concurrently(actors: RoleGroup[Any], tmp_path: Path) -> None:
    assert actors.meet(tmp_path, 3).result() == [0, 1, 2]


@ON_RAY
def test_a_timeout_applies_to_all_workers_and_names_the_missing_ranks(actors: RoleGroup[Any], gate: Path) -> None:
    with pytest.raises(WorkerTimeout, match=says(f"{workers.HELD_S / 2:g} s", "ACTOR.held_on_rank1", 1)) as caught:
        actors.held_on_rank1(gate)
    assert ("ACTOR", 1, 1) in caught.value.missing
    with pytest.raises(TimeoutError, match=says("0.2 s", "ACTOR.held", "0, 1, 2")):
        actors.held(gate).result(0.2)
    gate.touch()
    assert actors.quick() == [0, 1, 2]
    # The same processes serve the call, because a timeout of the caller does not kill workers.
    assert [member.attempt for member in actors] == [1, 1, 1]


def test_pre_func_changes_the_arguments_and_post_func_the_result(actors: RoleGroup[Any]) -> None:
    assert actors.not_negative(-5) == 0
    assert actors.not_negative(5) == 15


def test_an_error_keeps_its_type_and_its_notes_name_all_workers_that_failed(
    actors: RoleGroup[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.futures, "_GRACE_AFTER_FAILURE_S", 60.0)
    with pytest.raises(KeyError, match="lost in rank 1") as caught:
        actors.fail(1)
    for facts in (("ACTOR-1", "fail"), ("ACTOR-2", "KeyError('lost in rank 2')")):
        assert any(re.search(says(*facts), note) for note in caught.value.__notes__)
    text = "".join(traceback.format_exception(caught.value))
    assert "workers.py" in text
    assert 'raise KeyError(f"lost in rank' in text


def test_an_unknown_method_raises_an_error_with_the_known_ones(actors: RoleGroup[Any]) -> None:
    with pytest.raises(AttributeError, match=says("ACTOR", "'eco'", " echo,")):
        actors.eco()


def test_a_public_method_without_a_decorator_gets_its_arguments_whole(actors: RoleGroup[Any]) -> None:
    assert actors.undecorated([1, 2, 3]) == [(rank, [1, 2, 3]) for rank in range(3)]
    assert actors.call("undecorated", [1]).result() == [(rank, [1]) for rank in range(3)]


def test_a_missing_role_raises_an_error_unless_it_is_optional(echoes: None) -> None:
    with pytest.raises(ValueError, match=says("TOOL", "ACTOR", "SOLO")):
        RoleGroup("tool")
    assert len(RoleGroup("tool", optional=True)) == 0


def test_a_stub_selects_the_method_that_is_bound_to_it(echoes: None) -> None:
    assert workers.whole([1, 2]) == [[1, 2]] * 3
    assert workers.first_only() == 10


def test_call_batch_returns_the_sequence_of_all_items(echoes: None) -> None:
    sequence = workers.doubled([1, 2, 3, 4, 5])
    assert isinstance(sequence, FutureSequence)
    assert len(sequence) == 5
    assert (sequence[0], sequence[-1], sequence[1:4], list(sequence)) == (2, 10, [4, 6, 8], [2, 4, 6, 8, 10])
    assert sequence.result() == [2, 4, 6, 8, 10]


def test_call_batch_accepts_fewer_items_than_workers(echoes: None) -> None:
    assert workers.doubled([4]).result() == [8]
    with pytest.raises(IndexError):
        workers.doubled([4])[1]


def test_call_batch_with_a_size_that_differs_from_the_arguments_raises_an_error(actors: RoleGroup[Any]) -> None:
    with pytest.raises(ValueError, match=says("doubled", 3, 2)):
        actors.call_batch(workers.doubled, 3, [1, 2])


@ON_RAY
def test_every_worker_has_its_own_identity_and_environment(ranks: RoleGroup[Any], actors: RoleGroup[Any]) -> None:
    (role, rank, environment, local, port, threads, colour, master_port, _, *ranks_of), second = ranks.identity()
    assert (role, rank, environment, local, threads, colour) == ("CRITIC", 0, 2, 0, "1", "blue")
    assert second[:4] == ("CRITIC", 1, 2, 1)
    assert port == second[4] > 0
    assert master_port == str(port)
    assert ranks_of == ["0", "2"]
    third = actors.identity()[2]
    assert third[:3] == ("ACTOR", 2, 3)
    assert (third[6], third[-2:]) == ("red", ("2", "3"))


@ON_RAY
def test_a_worker_has_the_requested_threads_or_its_part_of_the_cores(solo: RoleGroup[Any], echoes: None) -> None:
    assert solo.identity()[0][5] == "2"
    assert [identity[5] for identity in group_of(2).identity()] == ["2", "2"]  # threads=-3: a third of 7 cores
    assert solo.identity()[0][8] == ("PASSIVE", "20000")


def test_calls_to_one_worker_run_in_the_order_of_the_calls(solo: RoleGroup[Any]) -> None:
    first = solo.slow(0.05)
    second = solo.call("echo", "after")
    assert second.result() == [(0, "after")]
    assert first.done()


@ON_RAY
def test_a_long_wait_logs_the_workers_it_waits_for(
    actors: RoleGroup[Any], gate: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_gate_after_report() -> None:
        output = ""
        while not re.search(says("DRIVER-0", "ACTOR.held", "0, 1, 2"), output):
            output += capsys.readouterr().out
        gate.touch()

    monkeypatch.setattr(core.futures, "FIRST_REPORT_AFTER_S", 0.1)
    reader = threading.Thread(target=open_gate_after_report, daemon=True)
    reader.start()
    assert actors.held(gate).result() == [0, 1, 2]


@pytest.mark.parametrize("workers_", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_chunks_are_in_order_and_their_sizes_differ_by_at_most_one(echoes: None, workers_: int, length: int) -> None:
    parts = [part for _, part in group_of(workers_).echo(list(range(length)))]
    assert [item for part in parts for item in part] == list(range(length))
    sizes = [len(part) for part in parts]
    assert len(parts) == min(workers_, length)
    assert max(sizes) - min(sizes) <= 1


def test_an_empty_batch_calls_no_worker(actors: RoleGroup[Any]) -> None:
    assert actors.echo([]) == []
    assert actors.echo(np.zeros((0, 2))) == []
    assert list(actors.call_batch("doubled", 0, [])) == []


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        ((1, 2, 3), ["tuple:3"] * 3),
        ("abc", ["str:3"] * 3),
        ({"a": [1, 2, 3]}, ["dict:1"] * 3),
        (None, ["NoneType:None"] * 3),
        (7, ["int:7"] * 3),
        ([[1, 2], [3], []], ["list:1"] * 3),
        ([(1, 2), "ab", {"a": 1}, None], ["list:2", "list:1", "list:1"]),
        (np.arange(4), ["ndarray:2", "ndarray:1", "ndarray:1"]),
        (np.float64(1.5), ["float64:1.5"] * 3),
        (torch.arange(8).reshape(4, 2), ["Tensor:2", "Tensor:1", "Tensor:1"]),
        (Batch.from_rows({"tokens": [torch.arange(n) for n in (1, 2, 3, 4)]}), ["Batch:2", "Batch:1", "Batch:1"]),
        (replicate([1, 2, 3, 4]), ["list:4"] * 3),
        (replicate(replicate([1])), ["list:1"] * 3),
    ],
)
def test_each_type_of_argument_is_split_or_sent_whole(
    actors: RoleGroup[Any], value: object, arrives: list[str]
) -> None:
    assert actors.kinds(value) == arrives


def test_received_arrays_are_read_only_copies(solo: RoleGroup[Any]) -> None:
    array = np.zeros(3)
    assert solo.writable(replicate(array)) == [False]
    future = solo.call("echo", array)
    array += 1
    ((_, arrived),) = future.result()
    assert arrived.tolist() == [0, 0, 0]
    assert not arrived.flags.writeable


def test_a_pre_func_in_the_form_of_dlrover_raises_an_error(actors: RoleGroup[Any]) -> None:
    with pytest.raises(ValueError, match=says("ACTOR.prepared_as_dlrover_does", "DLRover", "pair")):
        actors.prepared_as_dlrover_does(1)


def test_pre_func_and_post_func_may_be_any_callables(actors: RoleGroup[Any]) -> None:
    assert actors.largest_plus_one([1, 5, 2]) == 6
    assert actors.swapped(1, 2) == [(2, 1)] * 3


def test_private_unknown_and_reserved_names_cannot_be_called(actors: RoleGroup[Any]) -> None:
    for name in ("_private", "undecorate", "setup", "info", "run"):
        with pytest.raises(AttributeError):
            getattr(actors, name)
        with pytest.raises(AttributeError):
            actors.call(name)
    assert not hasattr(actors, "undecorate")
    with pytest.raises(AttributeError, match="'whole'"):
        actors.whole([1])  # bound to a stub, which selects the workers


def test_a_bare_rpc_at_the_top_level_of_a_module_exports_the_function(actors: RoleGroup[Any]) -> None:
    doubled: Any = workers.doubled_in_the_workloads_module
    assert actors.call(doubled, 3).result() == actors.call(doubled.__name__, 3).result() == [6] * 3
    assert actors.call("doubled_later_in_the_workloads_module", 4).result() == [8] * 3
    assert doubled(5) == 10  # it can still be called as a function


@pytest.mark.parametrize("call", ["echo", "echo_whole", "undecorated"])
def test_a_future_as_an_argument_raises_an_error(actors: RoleGroup[Any], call: str) -> None:
    future = actors.slow(0.0)
    with pytest.raises(TypeError, match=says("result()")):
        getattr(actors, call)(future)
    with pytest.raises(TypeError, match=says("result()")):
        actors.call_batch("count", 3, future)
    assert (future.result(), len(future)) == ([0, 1, 2], 3)


def test_a_function_outside_of_a_class_can_be_exported(actors: RoleGroup[Any]) -> None:
    assert actors.call("from_outside", 5).result() == [105] * 3


def test_an_rpc_function_of_the_workloads_module_is_exported(actors: RoleGroup[Any]) -> None:
    assert actors.call("of_module").result() == [3] * 3


def test_a_call_by_name_accepts_keyword_arguments(actors: RoleGroup[Any]) -> None:
    assert actors.call("with_names", 1, second=2).result() == [(1, 2)] * 3
    assert "TWO.doubled" in repr(RoleGroup("two").call_batch("doubled", 4, [1, 2, 3, 4]))


def test_an_empty_optional_group_returns_an_empty_list_and_has_no_first_worker(echoes: None) -> None:
    empty = RoleGroup("nobody", optional=True)
    assert empty.call("echo", 1).result() == []
    with pytest.raises(ValueError, match=says("NOBODY", "echo")):
        empty.call_rank0("echo", 1)
    with pytest.raises(ValueError, match=says("NOBODY", "echo")):
        empty.call_batch("echo", 1, [1])


def test_sys_exit_in_a_call_raises_an_error_and_does_not_end_the_process(solo: RoleGroup[Any]) -> None:
    with pytest.raises(RuntimeError, match=says("SOLO-0", "sys.exit(3)", "leave")):
        solo.leave(3)
    assert solo.echo(1) == [(0, 1)]


def test_two_roles_may_export_the_same_name(echoes: None) -> None:
    assert RoleGroup("actor").call_rank0(workers.first_only).result() == 10
    assert RoleGroup("two").call(workers.first_only).result() == [10, 11]


def test_groups_work_inside_a_workload_and_in_its_async_methods(solo: RoleGroup[Any]) -> None:
    split = [(0, [7]), (1, [7]), (2, [7])]
    assert solo.ask("ACTOR", 7) == (split, [(0, 7), (1, 7), (2, 7)])
    assert solo.ask_async("ACTOR", 7) == ([(0, 7), (1, 7), (2, 7)], (0, 7), ["ACTOR-0"])


def test_the_current_workload_is_the_same_before_and_after_a_call(solo: RoleGroup[Any]) -> None:
    assert solo.identity_around_a_call_to("ACTOR") == ["SOLO-0", "SOLO-0"]
    assert RoleGroup("both_a").identity_around_a_call_to("BOTH_B") == ["BOTH_A-0", "BOTH_A-0"]
    assert current().identity.name == "DRIVER-0"


def test_workloads_of_one_process_can_call_each_other(echoes: None) -> None:
    assert RoleGroup("both_a").ask("BOTH_B", 7) == ([(0, [7, 7, 7])], [(0, 7)])
    assert RoleGroup("both_a").ask_async("BOTH_B", 7) == ([(0, 7)], (0, 7), ["BOTH_B-0"])


def test_a_group_of_one_rank_calls_only_this_rank(actors: RoleGroup[Any]) -> None:
    assert actors.on(2).echo(1) == [(2, 1)]
    assert actors.on(1).call("echo", 5).result() == [(1, 5)]
    assert (len(actors.on(0)), len(actors)) == (1, 3)
    with pytest.raises(ValueError, match=says("ACTOR", 3, "rank 3")):
        actors.on(3)


@pytest.mark.parametrize("backend", ["local"], indirect=True)
def test_a_workload_that_waits_for_itself_raises_an_error_in_local_mode(echoes: None) -> None:
    with pytest.raises(RuntimeError, match="BOTH_A-0"):
        RoleGroup("both_a").ask("BOTH_A", 7)


def test_an_async_method_can_be_called_with_and_without_concurrency(solo: RoleGroup[Any]) -> None:
    assert solo.call("name_later", 0.01).result() == ["SOLO-0"]
    assert RoleGroup("crowd").call("name_later", 0.0).result() == ["CROWD-0"]


@ON_RAY
def test_async_calls_run_concurrently_if_the_role_has_a_concurrency(echoes: None) -> None:
    crowd = RoleGroup("crowd")
    futures = [crowd.met(4) for _ in range(4)]
    assert crowd.echo(1) == [(0, 1)]  # a plain method runs concurrently with them
    assert [future.result() for future in futures] == [[4]] * 4


async def _gather(actors: RoleGroup[Any]) -> tuple[object, object]:
    return await actors.slow(0.1), await actors.call("echo", 1)


def test_futures_can_be_awaited(actors: RoleGroup[Any]) -> None:
    import asyncio

    assert asyncio.run(_gather(actors)) == ([0, 1, 2], [(0, 1), (1, 1), (2, 1)])

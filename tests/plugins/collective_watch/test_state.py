"""State of a rank, sentences about waits, timeouts and aborts. Process groups and records of NCCL are stand-ins."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch

from plugins.collective_watch.abort import abort_groups
from plugins.collective_watch.guard import set_timeouts
from plugins.collective_watch.sentence import missing_ranks, wait_sentence
from plugins.collective_watch.state import Pending, RankState, _stack_of, collectives, phase_of, read_state


def entry(number: int, state: str, *, retired: bool, group: str = "0", operation: str = "nccl:all_reduce") -> Any:
    """Return a record of torch's flight recorder, as NCCL writes it."""
    return {
        "process_group": (group, "default_pg"),
        "collective_seq_id": number,
        "profiling_name": operation,
        "time_created_ns": 1000 + number,
        "state": state,
        "retired": retired,
        "is_p2p": False,
    }


def test_the_oldest_collective_that_has_not_completed_is_pending() -> None:
    entries = [
        entry(1, "completed", retired=True),
        entry(2, "completed", retired=False),  # as NCCL's watchdog has not yet seen its end
        entry(3, "started", retired=False, operation="nccl:_all_gather_base"),
        entry(4, "scheduled", retired=False),
        entry(1, "scheduled", retired=True, group="7", operation="gloo:barrier"),
    ]
    assert collectives(entries) == (Pending("0", 3, "_all_gather_base"), {"0": 4, "7": 1})
    assert collectives(entries[:2]) == (None, {"0": 2})


def test_phase_of_a_stack_is_that_of_its_innermost_function_with_a_known_name() -> None:
    def train_step() -> str:
        def step() -> str:
            return phase_of(list(_stack_of(sys._getframe())))

        return step()

    assert train_step() == "the optimizer step"


def test_state_of_a_rank_survives_its_journey_as_json() -> None:
    state = RankState(3, 1, 2, "the backward pass", "layer 12", Pending("0", 9, "all_gather"), {"0": 9})
    assert RankState.from_dict(state.as_dict()) == state
    assert read_state(0, 1, 0).pending is None


def test_sentence_names_three_of_the_ranks_that_are_missing() -> None:
    waiting = RankState(3, 9, 0, "the forward pass", "layer 12", Pending("0", 7, "all_gather"), {"0": 7})
    states = {
        1: RankState(1, 9, 0, "the optimizer step", "", None, {"0": 6}),
        2: RankState(2, 9, 0, "saving a checkpoint", "", Pending("5", 1, "barrier"), {"0": 6}),
        4: RankState(4, 9, 0, "the forward pass", "layer 12", Pending("0", 7, "all_gather"), {"0": 7}),
        5: RankState(5, 2, 0, "the backward pass", "layer 2", None, {"0": 6}),
    }
    missing = missing_ranks(waiting, range(7), states)
    assert missing == [0, 1, 2, 5, 6]
    assert wait_sentence("ACTOR", waiting, [1], states, {}) == (
        "rank 3 of ACTOR waits in all_gather of layer 12 (the forward pass) for rank 1, which is in the optimizer step"
    )
    sentence = wait_sentence("", waiting, [0, 2, 5, 1], states, {5: 40.0})
    assert sentence == (
        "rank 3 waits in all_gather of layer 12 (the forward pass) for rank 0, which has reported nothing; and for "
        "rank 2, which is in barrier (saving a checkpoint), another collective; and for rank 5, which has not "
        "responded for 40 s and was last in the backward pass of layer 2; and for 1 more ranks"
    )
    assert "which all ranks have started" in wait_sentence("ACTOR", waiting, [], states, {})


class Backend:
    """Backend of a process group on GPUs, which records its calls."""

    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[Any] = []
        self._fails = fails

    def abort(self) -> None:
        self.calls.append("abort")
        if self._fails:
            raise RuntimeError("communicator is gone")

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.calls.append(timeout.total_seconds())


class Group:
    """Process group with gloo for the host and a backend for GPUs."""

    def __init__(self, gpu: Backend) -> None:
        self.backends: dict[str, Any] = {"cpu": Backend(), "cuda": gpu}
        self._device_types = [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        return self.backends[device.type]


def test_an_abort_ends_the_communicators_on_gpus_of_all_groups_even_if_one_fails() -> None:
    groups = [Group(Backend(fails=True)), Group(Backend())]
    assert abort_groups(dict.fromkeys(groups)) == 1
    assert [group.backends["cuda"].calls for group in groups] == [["abort"], ["abort"]]
    assert [group.backends["cpu"].calls for group in groups] == [[], []]


def test_a_collective_on_gpus_ends_before_the_stall_timeout_and_an_error_of_gloo_comes_after_it() -> None:
    group = Group(Backend())
    set_timeouts(86400, 1800, group)
    assert (group.backends["cuda"].calls, group.backends["cpu"].calls) == ([1710], [2700])
    set_timeouts(86400, 0, group)
    assert (group.backends["cuda"].calls[-1], group.backends["cpu"].calls[-1]) == (86400, 86400)

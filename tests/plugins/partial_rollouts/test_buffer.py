"""Prompts in generation on several engines.

A test sets the number of rounds after which an engine finishes a prompt. A prompt is one token, its own id. A response
consists of that token and the weight version at its beginning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.batch import Batch
from components.generate.sampler import Collected
from plugins.partial_rollouts.buffer import PartialRolloutBuffer
from training.run.queue import open_queue

SAMPLES = 2


@dataclass
class Engines:
    """Engines that finish a prompt after a given number of `collect` rounds. A replaced engine has no prompts."""

    count: int = 2
    rounds: Mapping[int, int] = field(default_factory=dict)
    """prompt_id -> number of rounds until the prompt is finished. Default: 1."""
    version: int = 0
    taken: int = 0
    said: list[str] = field(default_factory=list)
    begun: list[tuple[int, int, int]] = field(default_factory=list)
    """Engine, prompt and step, in order of their start."""
    playing: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """Engine -> prompt_id -> remaining rounds, and the weight version at the beginning."""
    stop: bool = False

    def take(self, count: int) -> Batch:
        ids = list(range(self.taken, self.taken + count))
        self.taken += count
        return Batch.from_rows({"tokens": [[i] for i in ids]}, {"prompt_id": ids}, {"label": [str(i) for i in ids]})

    def begin(self, parts: Sequence[Batch | None], step: int) -> None:
        assert len(parts) == self.count
        for engine, prompts in enumerate(parts):
            for key in ids(prompts) if prompts else ():
                self.begun.append((engine, key, step))
                assert key not in self.playing.setdefault(engine, {})
                self.playing[engine][key] = (self.rounds.get(key, 1), self.version)

    def collect(self, seconds: float) -> list[Collected]:
        assert 0 < seconds < 1
        collected = []
        for engine in range(self.count):
            playing = self.playing.setdefault(engine, {})
            playing.update({key: (rounds - 1, version) for key, (rounds, version) in playing.items()})
            done = {key: version for key, (rounds, version) in playing.items() if rounds <= 0}
            for key in done:
                del playing[key]
            collected.append(Collected(responses(done) if done else None, list(playing)))
        return collected

    def groups(self, in_flight: int, most_stale: int) -> PartialRolloutBuffer:
        return PartialRolloutBuffer(
            take=self.take,
            begin=self.begin,
            collect=self.collect,
            engines=self.count,
            samples=SAMPLES,
            in_flight=in_flight,
            most_stale=most_stale,
            version=lambda: self.version,
            stopped=lambda: self.stop,
            info=self.said.append,
        )


def responses(done: Mapping[int, int]) -> Batch:
    keys = [key for key in done for _ in range(SAMPLES)]
    columns = {"prompt_id": torch.tensor(keys), "weight_version": torch.tensor([done[key] for key in keys])}
    return Batch.from_rows({"tokens": [[key] for key in keys]}, columns, {"label": [str(key) for key in keys]})


def ids(batch: Batch | None) -> list[int]:
    assert batch is not None
    kept = batch["prompt_id"].tolist()
    assert kept[::SAMPLES] == kept[1::SAMPLES], "responses to a prompt are not side by side"
    assert batch["label"] == [str(key) for key in kept]
    return kept[::SAMPLES]


def test_a_step_without_spare_prompts_waits_for_all_and_balances_the_engines() -> None:
    engines = Engines(count=2, rounds={0: 3})
    groups = engines.groups(in_flight=3, most_stale=1)
    assert ids(groups.fill(1, 3, 6)) == [0, 1, 2]
    assert engines.begun == [(0, 0, 1), (0, 2, 1), (1, 1, 1)]
    assert groups.metrics == {"rollout/carried_groups": 0, "rollout/restarted_groups": 0}
    assert ids(groups.fill(2, 3, 3)) == [3, 4, 5]
    assert (len(groups), engines.taken) == (0, 6)


def test_a_slow_group_is_in_the_next_batch_and_counted_as_carried() -> None:
    engines = Engines(rounds={0: 4}, version=5)
    groups = engines.groups(in_flight=3, most_stale=2)
    assert ids(groups.fill(6, 2, 6)) == [1, 2]
    assert (groups.metrics["rollout/carried_groups"], len(groups)) == (0, 1)
    engines.version = 6
    # Prompt 0 has finished two of four rounds, and its version is 2 behind in the next batch.
    assert ids(groups.fill(7, 2, 4)) == [3, 4]
    assert ids(groups.fill(8, 2, 2)) == [0, 5]
    assert groups.metrics["rollout/carried_groups"] == 1
    assert engines.begun == [(0, 0, 6), (0, 2, 6), (1, 1, 6), (0, 4, 7), (1, 3, 7), (1, 5, 8)]


def test_surplus_finished_groups_wait_for_the_next_batch() -> None:
    engines = Engines()
    groups = engines.groups(in_flight=4, most_stale=1)
    assert ids(groups.fill(1, 2, 6)) == [0, 1]
    assert ids(groups.fill(2, 2, 4)) == [2, 3]
    assert ids(groups.fill(3, 2, 2)) == [4, 5]
    assert groups.metrics["rollout/carried_groups"] == 2


def test_groups_are_ordered_by_time_of_completion_and_then_by_age() -> None:
    engines = Engines(rounds={0: 2, 1: 2})
    groups = engines.groups(in_flight=5, most_stale=3)
    assert ids(groups.fill(1, 2, 9)) == [2, 3]
    # Prompt 4 has waited longest. 0, 1, 5 and 6 finish in the same round.
    assert ids(groups.fill(2, 2, 7)) == [0, 4]


def test_a_batch_waits_for_a_group_that_would_be_too_old_for_the_next_one() -> None:
    engines = Engines(rounds={0: 5})
    groups = engines.groups(in_flight=3, most_stale=1)
    assert ids(groups.fill(1, 2, 6)) == [1, 2]
    # Started with version 0, it is 1 version behind in the batch of step 2, and would be 2 behind in step 3.
    engines.version = 1
    assert ids(groups.fill(2, 2, 4)) == [0, 3]
    assert ids(groups.fill(3, 2, 2)) == [4, 5]


def test_groups_of_a_replaced_engine_restart_with_their_random_numbers_and_a_message() -> None:
    engines = Engines(rounds={0: 9, 2: 9})
    groups = engines.groups(in_flight=4, most_stale=3)
    assert ids(groups.fill(1, 2, 6)) == [1, 3]
    engines.playing[0].clear()
    engines.version = 2
    engines.rounds = {}
    assert ids(groups.fill(3, 2, 4)) == [4, 5]
    assert groups.metrics["rollout/restarted_groups"] == 2
    assert engines.said == ["engine 0 has lost 2 prompts in generation; they are begun again"]
    assert engines.begun[-2:] == [(0, 0, 1), (1, 2, 1)]
    last = groups.fill(4, 2, 2)
    assert last is not None
    assert (ids(last), last["weight_version"].tolist()) == ([0, 2], [2, 2, 2, 2])


def test_only_as_many_prompts_start_as_the_run_still_needs() -> None:
    engines = Engines()
    groups = engines.groups(in_flight=4, most_stale=1)
    assert ids(groups.fill(1, 2, 3)) == [0, 1]
    assert ids(groups.fill(2, 1, 1)) == [2]
    assert (engines.taken, len(groups)) == (3, 0)


def test_a_batch_is_abandoned_when_the_run_stops() -> None:
    engines = Engines(rounds={0: 9}, stop=True)
    assert engines.groups(in_flight=2, most_stale=1).fill(1, 2, 4) is None


def test_a_state_has_the_running_prompts_and_the_complete_responses() -> None:
    engines = Engines(rounds={0: 9})
    groups = engines.groups(in_flight=4, most_stale=1)
    assert groups.state_dict() == {}
    assert ids(groups.fill(1, 2, 8)) == [1, 2]
    state = groups.state_dict()
    assert (state["prompts"]["prompt_id"].tolist(), state["steps"], state["versions"]) == ([0, 3], [1, 1], [0, 0])
    assert ids(state["answers"]) == [3]
    later = Engines(taken=engines.taken, version=1)
    resumed = later.groups(in_flight=4, most_stale=1)
    resumed.load_state_dict(state)
    assert len(resumed) == 2
    # Prompt 3 is due, because it started with version 0. Prompt 0 starts again, with version 1 and the random numbers
    # of step 1.
    batch = resumed.fill(2, 2, 6)
    assert batch is not None
    assert (ids(batch), batch["weight_version"].tolist()) == ([0, 3], [1, 1, 0, 0])
    assert later.begun == [(0, 0, 1), (0, 5, 2), (1, 4, 2)]
    resumed.load_state_dict({})
    assert len(resumed) == 0


def test_a_resumed_run_respects_a_lower_limit_of_prompts_in_flight() -> None:
    engines = Engines(rounds={0: 9, 1: 9, 2: 9})
    before = engines.groups(in_flight=6, most_stale=1)
    assert ids(before.fill(1, 3, 9)) == [3, 4, 5]
    later = Engines(taken=6)
    groups = later.groups(in_flight=2, most_stale=1)
    groups.load_state_dict(before.state_dict())
    assert ids(groups.fill(2, 1, 4)) == [0]
    assert [key for _, key, _ in later.begun] == [0, 1]
    assert ids(groups.fill(3, 1, 3)) == [1]
    assert ids(groups.fill(4, 1, 2)) == [2]
    assert ids(groups.fill(5, 1, 1)) == [6]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_each_prompt_is_trained_on_once_within_the_staleness_limit_despite_failures(
    data: st.DataObject,
) -> None:
    steps = 5
    count = 3
    most_ahead = data.draw(st.integers(1, 2))
    in_flight = data.draw(st.integers(count, 2 * count))
    most_stale = most_ahead + 1
    slow = {key: data.draw(st.integers(1, 12)) for key in range(steps * count)}
    states: dict[str, Any] = {"stream": {"step": 0}, "groups": {}, "prompts": {"taken": 0}}
    trained: list[int] = []
    while (done := states["stream"]["step"]) < steps:
        engines = Engines(rounds=slow, version=done, taken=states["prompts"]["taken"])
        groups = engines.groups(in_flight, most_stale)
        groups.load_state_dict(states["groups"])
        lost = data.draw(st.sets(st.integers(1, steps)))

        def generate(
            step: int, engines: Engines = engines, groups: PartialRolloutBuffer = groups, lost: Any = lost
        ) -> Any:
            if step in lost:
                engines.playing.get(step % 2, {}).clear()
            return groups.fill(step, count, (steps - step + 1) * count)

        sources = {"groups": groups, "prompts": Taken(engines)}
        stream = open_queue(generate, steps, most_ahead, sources=sources)
        stream.load_state_dict(states["stream"])
        killed = data.draw(st.integers(done + 1, steps))
        for batch in stream:
            trained += ids(batch)
            stale_B = engines.version - batch["weight_version"]
            assert int(stale_B.min()) >= 0
            assert int(stale_B.max()) <= most_stale
            engines.version = stream.step
            if stream.step == killed:
                states = stream.states()
                break
    assert sorted(trained) == list(range(steps * count))


@dataclass
class Taken:
    """Position in the prompts of some engines, as part of the state of a run."""

    engines: Engines

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.engines.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.engines.taken = state["taken"]

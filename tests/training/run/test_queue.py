"""The stream of batches for a training loop, inline and from a thread that generates ahead."""

import contextvars
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.run.phase_clock import PhaseClock
from training.run.queue import RolloutQueue, open_queue

SECONDS = 100
"""Seconds after which an event that never occurs counts as hung."""


def test_without_a_queue_each_batch_is_generated_on_request() -> None:
    made: list[int] = []

    def generate(step: int) -> str:
        made.append(step)
        return f"batch {step}"

    stream = open_queue(generate, steps=3)
    seen = [(batch, stream.step, list(made)) for batch in stream]
    assert seen == [("batch 1", 1, [1]), ("batch 2", 2, [1, 2]), ("batch 3", 3, [1, 2, 3])]
    assert list(stream) == []


def test_a_state_saved_in_the_loop_body_resumes_with_the_next_step() -> None:
    stream = open_queue(lambda step: step, steps=4)
    states = [stream.state_dict() for _ in stream]
    assert states[1] == {"step": 2}
    resumed = open_queue(lambda step: step, steps=4)
    resumed.load_state_dict(states[1])
    assert len(resumed) == 2
    assert list(resumed) == [3, 4]


@pytest.mark.parametrize("queue_size", [0, 2])
def test_a_failed_generation_is_retried_after_the_earlier_steps(queue_size: int) -> None:
    attempts: list[int] = []

    def generate(step: int) -> int:
        attempts.append(step)
        if len(attempts) == 2:
            raise RuntimeError("engine lost")
        return step

    stream = open_queue(generate, 3, queue_size)
    batches = iter(stream)
    assert next(batches) == 1
    with pytest.raises(RuntimeError, match="engine lost"):
        next(batches)
    assert (stream.step, attempts) == (1, [1, 2])
    assert list(stream) == [2, 3]


@pytest.mark.parametrize("queue_size", [0, 1, 3])
def test_the_stream_ends_with_the_data_and_after_a_stop_steps_remain(queue_size: int) -> None:
    ended = open_queue(lambda step: step if step < 3 else None, 5, queue_size)
    assert list(ended) == [1, 2]
    assert (ended.step, len(ended)) == (2, 0)
    drawn_steps: list[int] = []
    stopped = open_queue(
        lambda step: drawn_steps.append(step) if step == 3 else step, 5, stopped=lambda: 3 in drawn_steps
    )
    assert list(stopped) == [1, 2]
    assert (stopped.step, len(stopped)) == (2, 3)


# --- ahead


class Prompts:
    """Returns 0, 1, 2, ..., two per batch. The batch of step `halt` waits between the two."""

    def __init__(self, halt: int = 0) -> None:
        self.taken = 0
        self.begun: list[int] = []
        self._halt = halt
        self._changed = threading.Condition()

    def generate(self, step: int) -> list[int]:
        with self._changed:
            self.begun.append(step)
            self.taken += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: step != self._halt, SECONDS)
            self.taken += 1
            return [self.taken - 2, self.taken - 1]

    def until(self, step: int) -> None:
        """Wait until the generation of a step has begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: step in self.begun, SECONDS)

    def go_on(self) -> None:
        with self._changed:
            self._halt = 0
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


def ahead(prompts: Prompts, steps: int, queue_size: int, **options: Any) -> RolloutQueue[list[int]]:
    return open_queue(prompts.generate, steps, queue_size, sources={"prompts": prompts}, **options)


@pytest.mark.parametrize("queue_size", [1, 2])
def test_generation_starts_at_most_queue_size_steps_ahead(queue_size: int) -> None:
    prompts, seen = Prompts(), []
    for batch in (stream := ahead(prompts, 6, queue_size)):
        seen.append(batch)
        # In the body of step t, the steps up to t - 1 have ended.
        prompts.until(min(stream.step + queue_size, 6))
        assert max(prompts.begun) == min(stream.step + queue_size, 6)
        # With a queue of two, this batch was finished before the one that is being generated now.
        assert stream.metrics["rollout/queued_batches"] >= (queue_size == 2 and stream.step > 1)
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert prompts.begun == [1, 2, 3, 4, 5, 6]


def test_queued_batches_and_metrics_equal_those_without_a_queue() -> None:
    runs = []
    for queue_size in (0, 2):
        prompts = Prompts()
        stream = ahead(prompts, 4, queue_size, metrics=lambda of=prompts: {"taken": float(of.taken)})
        runs.append([(batch, stream.step, stream.metrics["taken"]) for batch in stream])
    assert runs[0] == runs[1] == [([0, 1], 1, 2), ([2, 3], 2, 4), ([4, 5], 3, 6), ([6, 7], 4, 8)]


def test_the_generation_thread_has_the_context_variables_of_the_loop() -> None:
    job = contextvars.ContextVar("job", default="none")
    stream = open_queue(lambda step: (threading.current_thread() is threading.main_thread(), job.get()), 1, 1)
    job.set("mine")
    assert list(stream) == [(False, "mine")]


def test_leaving_the_loop_ends_the_thread_and_keeps_its_batches_for_later() -> None:
    prompts = Prompts(halt=2)
    stream = ahead(prompts, 5, 2)
    with pytest.raises(KeyError):
        for batch in stream:
            prompts.until(2)
            raise KeyError(str(batch))
    assert stream.ending
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "generation"]
    prompts.go_on()
    thread.join(SECONDS)
    assert (prompts.begun, stream.queued) == ([1, 2], 1)
    assert list(stream) == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_a_hanging_generation_does_not_keep_the_process_alive() -> None:
    program = """
import threading
from training.run.queue import open_queue
for batch in open_queue(lambda step: threading.Event().wait() if step == 2 else "batch", 3, 1):
    break
print(batch)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert (ended.stdout, ended.stderr) == ("batch\n", "")


def test_a_stop_ends_the_loop_before_the_next_batch_and_keeps_queued_batches() -> None:
    prompts, stop = Prompts(), threading.Event()
    stream = ahead(prompts, 9, 1, stopped=stop.is_set)
    for _ in stream:
        prompts.until(stream.step + 1)
        if stream.step == 2:
            stop.set()
    assert (stream.step, stream.queued, len(stream), prompts.begun) == (2, 1, 7, [1, 2, 3])
    stop.clear()
    assert next(iter(stream)) == [4, 5]


@pytest.mark.parametrize("queue_size", [0, 1])
def test_generation_is_cancelled_only_if_the_run_stops(queue_size: int) -> None:
    signals: list[bool] = []
    stop = threading.Event()

    def generate(step: int) -> int:
        signals.append(stream.ending)
        return step

    stream = open_queue(generate, 3, queue_size, stop.is_set)
    for step in stream:
        if step == 1:
            break
    stream.steps = 2  # the thread may already have generated the second batch
    signals.clear()
    assert list(stream) == [2]
    assert signals in ([], [False])
    stop.set()
    assert stream.ending


def test_a_stop_during_the_wait_keeps_the_arriving_batch_in_the_queue() -> None:
    stop, waits = threading.Event(), threading.Event()

    class Clock(PhaseClock):
        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            waits.set()  # the loop requests a batch
            yield

    def generate(step: int) -> int:
        assert waits.wait(SECONDS)
        stop.set()
        return step

    stream = open_queue(generate, 3, 1, stop.is_set, clock=Clock())
    assert list(stream) == []
    assert (stream.step, stream.queued, len(stream)) == (0, 1, 3)


def test_an_error_during_the_stop_of_a_run_is_raised() -> None:
    stop, begun = threading.Event(), threading.Event()

    def generate(step: int) -> int:
        if step == 2:
            begun.set()
            assert stop.wait(SECONDS)
            raise RuntimeError("engine lost")
        return step

    batches = iter(open_queue(generate, 3, 1, stop.is_set))
    assert next(batches) == 1
    assert begun.wait(SECONDS)
    stop.set()
    with pytest.raises(RuntimeError, match="engine lost"):
        next(batches)


def test_a_generation_cancelled_by_a_stop_is_repeated_with_the_same_prompts() -> None:
    prompts, stop = Prompts(halt=2), threading.Event()

    def generate(step: int) -> list[int] | None:
        batch = prompts.generate(step)
        return None if stream.ending else batch

    stream = open_queue(generate, 4, 1, stop.is_set, sources={"prompts": prompts})
    for _ in stream:
        prompts.until(2)
        stop.set()
        prompts.go_on()
    assert stream.states() == {"stream": {"step": 1}, "prompts": {"taken": 2}}
    stop.clear()
    assert list(stream) == [[2, 3], [4, 5], [6, 7]]


def trained_and_saved(prompts: Prompts, stream: RolloutQueue[list[int]], step: int, begun: int) -> Any:
    """Train up to `step`, wait in its body until the generation of step `begun` has begun, save, and leave the loop.

    If `begun` is 0, do not wait.
    """
    trained: list[int] = []
    for batch in stream:
        trained += batch
        if stream.step == step:
            if begun:
                prompts.until(begun)
            states = stream.states()
            prompts.go_on()
            return trained, states
    raise AssertionError(f"there is no step {step}")


def test_a_state_holds_the_queue_and_the_prompt_position_before_the_unfinished_batch() -> None:
    prompts = Prompts(halt=4)
    trained, states = trained_and_saved(prompts, ahead(prompts, 9, 3, most_stale=4), 1, begun=4)
    assert trained == [0, 1]
    assert states["prompts"] == {"taken": 6}
    counters = {"metrics": {}, "seconds": {}, "most_stale": 4}
    assert states["stream"] == {"step": 1, "queue": [{"batch": [2, 3], **counters}, {"batch": [4, 5], **counters}]}
    # It can also continue inline. Only batches generated before may have the allowed staleness.
    resumed = ahead(later := Prompts(), 5, 0)
    later.load_state_dict(states["prompts"])
    resumed.load_state_dict(states["stream"])
    assert [(batch, resumed.most_stale) for batch in resumed] == [([2, 3], 4), ([4, 5], 4), ([6, 7], 0), ([8, 9], 0)]


@pytest.mark.parametrize("queue_size", [0, 2])
def test_a_returned_batch_is_the_first_one_after_a_pause_or_resume(queue_size: int) -> None:
    stream = ahead(Prompts(), 5, queue_size)
    for _ in stream:
        if stream.step == 3:
            stream.put_back()
            break
    states = stream.states()
    assert states["stream"]["step"] == 2
    assert states["stream"]["queue"][0]["batch"] == [4, 5]
    assert list(stream) == [[4, 5], [6, 7], [8, 9]]
    resumed = ahead(later := Prompts(), 5, 0)
    later.load_state_dict(states["prompts"])
    resumed.load_state_dict(states["stream"])
    assert list(resumed) == [[4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("queue_size", [0, 1])
def test_a_failed_generation_does_not_change_the_state(queue_size: int) -> None:
    prompts, rewards = Prompts(), threading.Event()

    def generate(step: int) -> list[int]:
        batch = prompts.generate(step)
        if step == 3 and not rewards.is_set():
            raise RuntimeError("no rewards")
        return batch

    stream = open_queue(generate, 4, queue_size, sources={"prompts": prompts})
    trained: list[list[int]] = []
    with pytest.raises(RuntimeError, match="no rewards"):
        trained.extend(stream)
    assert trained == [[0, 1], [2, 3]]
    assert stream.states() == {"stream": {"step": 2}, "prompts": {"taken": 4}}
    rewards.set()
    assert list(stream) == [[4, 5], [6, 7]]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_run_killed_at_any_point_trains_on_every_prompt_once_in_order(data: st.DataObject) -> None:
    steps, trained = 6, list[int]()
    states: dict[str, Any] = {"stream": {"step": 0}, "prompts": {"taken": 0}}
    while (done := states["stream"]["step"]) < steps:
        queue_size = data.draw(st.integers(0, 3))
        killed = data.draw(st.integers(done + 1, steps))
        # The unfinished batch at that time, which was not saved before and may have been started.
        first = max(killed, done + len(states["stream"].get("queue", ()))) + 1
        halt = data.draw(st.sampled_from([0, *range(first, min(killed + queue_size, steps) + 1)]))
        prompts = Prompts(halt)
        prompts.load_state_dict(states["prompts"])
        stream = ahead(prompts, steps, queue_size)
        stream.load_state_dict(states["stream"])
        batches, states = trained_and_saved(prompts, stream, killed, begun=halt)
        trained += batches
    assert trained == list(range(2 * steps))

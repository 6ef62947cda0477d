"""The stream a training loop reads."""

import pytest

from components.data.stream import SampleStream


def test_the_loop_gets_one_batch_per_step_made_when_it_asks() -> None:
    made: list[int] = []

    def generate(step: int) -> str:
        made.append(step)
        return f"batch {step}"

    stream = SampleStream(generate, steps=3)
    seen = [(batch, stream.step, list(made)) for batch in stream]
    assert seen == [("batch 1", 1, [1]), ("batch 2", 2, [1, 2]), ("batch 3", 3, [1, 2, 3])]
    assert list(stream) == []


def test_a_state_saved_in_the_body_resumes_with_the_next_step() -> None:
    stream = SampleStream(lambda step: step, steps=4)
    states = [stream.state_dict() for _ in stream]
    resumed = SampleStream(lambda step: step, steps=4)
    resumed.load_state_dict(states[1])
    assert len(resumed) == 2
    assert list(resumed) == [3, 4]


def test_a_step_whose_generation_failed_is_tried_again() -> None:
    attempts: list[int] = []

    def generate(step: int) -> int:
        attempts.append(step)
        if len(attempts) == 2:
            raise RuntimeError("engine lost")
        return step

    stream = SampleStream(generate, steps=2)
    with pytest.raises(RuntimeError, match="engine lost"):
        list(stream)
    assert stream.step == 1
    assert list(stream) == [2]


def test_where_the_data_ends_the_stream_ends_and_where_it_was_stopped_steps_are_left() -> None:
    ended = SampleStream(lambda step: step if step < 3 else None, steps=5)
    assert list(ended) == [1, 2]
    assert (ended.step, len(ended)) == (2, 0)
    asked: list[int] = []
    stopped = SampleStream(lambda step: asked.append(step) if step == 3 else step, steps=5, stopped=lambda: 3 in asked)
    assert list(stopped) == [1, 2]
    assert (stopped.step, len(stopped)) == (2, 3)


def test_a_queue_is_refused_as_long_as_there_is_none() -> None:
    with pytest.raises(
        ValueError, match="asynchronous generation is not available yet in this version; set queue_size=0"
    ):
        SampleStream(lambda step: step, steps=1, queue_size=2)
    with pytest.raises(ValueError, match="steps=-1 is negative"):
        SampleStream(lambda step: step, steps=-1)

"""Epochs of given data: every group once, in an order determined by the seed."""

import pytest

from components.batch import Batch
from tests.messages import says
from training.run.epochs import Epochs

ROWS = Batch.from_rows({"tokens": [[number] * (1 + number % 3) for number in range(10)]})


def seen(data: Epochs) -> list[list[int]]:
    """Return the first token of each sequence, which is its number, by step."""
    return [[tokens[0] for tokens in data.minibatch(step).lists("tokens")] for step in range(1, data.steps + 1)]


def test_each_epoch_has_every_sequence_once_in_a_new_order() -> None:
    steps = seen(Epochs(ROWS, batch_size=4, epochs=2, seed=3))
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    first, second = ([number for step in epoch for number in step] for epoch in (steps[:3], steps[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert seen(Epochs(ROWS, batch_size=4, epochs=2, seed=3)) == steps
    assert seen(Epochs(ROWS, batch_size=4, epochs=2, seed=4)) != steps


def test_the_sequences_of_a_group_stay_together() -> None:
    steps = seen(Epochs(ROWS, batch_size=2, epochs=1, seed=0, group_size=2))
    assert [len(step) for step in steps] == [4, 4, 2]
    pairs = [tuple(step[place : place + 2]) for step in steps for place in range(0, len(step), 2)]
    assert sorted(pairs) == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


@pytest.mark.parametrize("other", [{"batch_size": 5}, {"seed": 2}, {"batch": ROWS.select([1, 0])}])
def test_a_state_is_accepted_only_for_the_same_data_in_the_same_order(other: dict[str, object]) -> None:
    settings: dict[str, object] = {"batch": ROWS, "batch_size": 4, "epochs": 1, "seed": 1}
    state = Epochs(**settings).state_dict()  # pyright: ignore[reportArgumentType]
    Epochs(**settings | {"epochs": 2}).load_state_dict(state)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=says("data", "seed", "train.batch_size", "resume")):
        Epochs(**settings | other).load_state_dict(state)  # pyright: ignore[reportArgumentType]

"""Rounds of dynamic sampling against loaders that are long, short, or hold nothing worth keeping."""

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.batch import Batch
from components.data.dynamic_filtering import Filled, fill_groups
from components.rl.rewards import groups_within


class Loader:
    """Prompts 0, 1, 2, ...: each answered `answers` times, prompt i with scores of mean `means[i]`."""

    def __init__(self, means: Sequence[float], answers: int = 2) -> None:
        self.means = means
        self.answers = answers
        self.asked: list[int] = []
        """The count of each round."""

    def generate(self, count: int) -> Batch:
        start = sum(self.asked)
        self.asked.append(count)
        ids = [i for i in range(start, start + count) for _ in range(self.answers)]
        return Batch.from_rows(
            {"tokens": [list(range(i % 3 + 1)) for i in ids]},
            per_sequence={
                "prompt_id": torch.tensor(ids, dtype=torch.int64),
                "score": torch.tensor([self.means[i] for i in ids]),
            },
            objects={"text": [f"answer {row % self.answers} to {i}" for row, i in enumerate(ids)]},
        )

    def fill(self, wanted: int) -> Filled:
        return fill_groups(self.generate, wanted, len(self.means), between_0_and_1)


def between_0_and_1(batch: Batch) -> torch.Tensor:
    return groups_within(batch["score"], batch["prompt_id"], 0.0, 1.0)


def ids_of(filled: Filled) -> list[int]:
    return [] if filled.batch is None else filled.batch["prompt_id"].tolist()


def test_what_is_filtered_is_replaced_until_the_step_is_full() -> None:
    # Asked for 3: prompt 1 stays. For 2: 3 stays. For 1: 5 is wrong. For 1: 6 stays. Prompt 7 is left to the loader.
    loader = Loader([0.0, 0.5, 1.0, 0.5, 1.0, 0.0, 0.5, 0.5])
    filled = loader.fill(3)
    assert loader.asked == [3, 2, 1, 1]
    assert ids_of(filled) == [1, 1, 3, 3, 6, 6]
    assert (filled.prompts_seen, filled.prompts_kept, filled.rounds) == (7, 3, 4)
    assert filled.batch is not None
    assert filled.batch["text"][2:4] == ["answer 0 to 3", "answer 1 to 3"]
    assert filled.batch.lengths.tolist() == [2, 2, 1, 1, 1, 1]


def test_a_step_that_is_full_at_once_takes_one_round() -> None:
    loader = Loader([0.5] * 4)
    assert ids_of(filled := loader.fill(2)) == [0, 0, 1, 1]
    assert (filled.prompts_seen, filled.prompts_kept, filled.rounds) == (2, 2, 1)


def test_what_was_kept_is_there_when_the_loader_runs_out() -> None:
    loader = Loader([0.5, 0.0, 1.0, 0.5, 0.0])
    filled = loader.fill(4)
    assert loader.asked == [4, 1]
    assert ids_of(filled) == [0, 0, 3, 3]
    assert (filled.prompts_seen, filled.prompts_kept, filled.rounds) == (5, 2, 2)


@pytest.mark.parametrize("means", [[], [0.0, 1.0, 1.0]])
def test_a_loader_with_nothing_to_keep_gives_no_batch(means: list[float]) -> None:
    filled = Loader(means).fill(2)
    assert filled.batch is None
    assert (filled.prompts_seen, filled.prompts_kept) == (len(means), 0)


def test_a_stop_is_seen_between_two_rounds() -> None:
    loader = Loader([0.5, 0.0, 0.0, 0.0, 0.0, 0.5])
    filled = fill_groups(loader.generate, 2, 6, between_0_and_1, stopped=lambda: len(loader.asked) == 2)
    assert loader.asked == [2, 1]
    assert ids_of(filled) == [0, 0]


def test_a_step_that_fills_slowly_says_how_far_it_is() -> None:
    # One prompt in twelve passes, and each round asks for the one that is missing.
    loader, said = Loader(([0.0] * 11 + [0.5]) * 2), []
    filled = fill_groups(loader.generate, 1, 24, between_0_and_1, say=said.append)
    assert said == ["0 of 1 prompts pass, after 10 were tried; 14 are left"]
    assert filled.metrics == {
        "rollout/filter_pass_rate": 1 / 12,
        "rollout/filter_prompts_seen": 12.0,
        "rollout/filter_rounds": 12.0,
    }


def test_rounds_that_differ_in_their_columns_are_an_error_that_names_them() -> None:
    loader = Loader([0.0, 0.5])

    def generate(count: int) -> Batch:
        batch = loader.generate(count)
        return batch if len(loader.asked) == 1 else batch.with_sequences(log_mood=batch["score"])

    with pytest.raises(ValueError, match="came with and without log_mood; reward code must give the same extra_logs"):
        fill_groups(generate, 1, 2, between_0_and_1)


patterns = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=60)


@given(patterns, st.integers(1, 20), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_every_group_that_was_accepted_is_there_once_and_in_order(
    means: list[float], wanted: int, answers: int
) -> None:
    loader = Loader(means, answers)
    filled = loader.fill(wanted)
    # One prompt after the other, until there are enough.
    slow: list[int] = []
    seen = 0
    while len(slow) < wanted and seen < len(means):
        if 0.0 < means[seen] < 1.0:
            slow.append(seen)
        seen += 1
    assert ids_of(filled) == [i for i in slow for _ in range(answers)]
    assert filled.prompts_kept == len(slow) <= wanted
    assert filled.prompts_seen == sum(loader.asked) == seen <= len(means)
    assert filled.rounds == len(loader.asked)


def test_answers_to_a_prompt_need_not_lie_together() -> None:
    def generate(count: int) -> Batch:
        ids = list(range(count)) * 2
        return Batch.from_rows({"tokens": [[i] for i in ids]}, per_sequence={"prompt_id": torch.tensor(ids)})

    filled = fill_groups(generate, 3, 3, lambda batch: batch["prompt_id"] != 1)
    assert ids_of(filled) == [0, 2, 0, 2]
    assert filled.prompts_kept == 2


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda batch: torch.tensor([True, True, False, True]), "keep parts the answers to prompt 1;"),
        (lambda batch: torch.ones(4), r"keep returned torch\.float32 of shape \[4\] for 4 answers; it must be bool"),
        (lambda batch: torch.ones(2).bool(), r"keep returned torch\.bool of shape \[2\] for 4 answers"),
    ],
)
def test_a_filter_that_cannot_be_is_named(keep: Callable[[Batch], torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_groups(Loader([0.5] * 4).generate, 2, 4, keep)


@pytest.mark.parametrize("brought", [1, 3])
def test_answers_to_more_or_fewer_prompts_than_asked_for_are_refused(brought: int) -> None:
    loader = Loader([0.5] * 4)
    with pytest.raises(
        ValueError, match=rf"generate\(2\) brought answers to {brought} prompts; it must answer the next 2"
    ):
        fill_groups(lambda _: loader.generate(brought), 2, 4, between_0_and_1)


def test_numbers_that_cannot_be_are_named() -> None:
    generate = Loader([0.5]).generate
    with pytest.raises(ValueError, match="wanted=0 prompts; ask for at least 1"):
        fill_groups(generate, 0, 1, between_0_and_1)
    with pytest.raises(ValueError, match="available=-1 prompts; it is at least 0"):
        fill_groups(generate, 1, -1, between_0_and_1)


def test_importing_it_brings_no_torch() -> None:
    code = "import sys, components.data.dynamic_filtering; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

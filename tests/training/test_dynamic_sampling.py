"""Rounds of dynamic sampling against loaders that are long, short, or hold nothing worth keeping."""

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.batch import Batch
from components.data.prompts import PromptSource
from components.data.tiny_model import character_tokenizer
from components.rl.rewards import groups_within
from tests.messages import says
from training.dynamic_sampling import Filled, PromptFilter, fill_groups


class Loader:
    """Prompts 0, 1, 2, ...: each answered `responses` times, prompt i with scores of mean `means[i]`."""

    def __init__(self, means: Sequence[float], responses: int = 2) -> None:
        self.means = means
        self.responses = responses
        self.asked: list[int] = []
        """The count of each round."""

    def generate(self, count: int) -> Batch:
        start = sum(self.asked)
        self.asked.append(count)
        ids = [i for i in range(start, start + count) for _ in range(self.responses)]
        return Batch.from_rows(
            {"tokens": [list(range(i % 3 + 1)) for i in ids]},
            per_sequence={
                "prompt_id": torch.tensor(ids, dtype=torch.int64),
                "score": torch.tensor([self.means[i] for i in ids]),
            },
            objects={"text": [f"response {row % self.responses} to {i}" for row, i in enumerate(ids)]},
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
    assert filled.batch["text"][2:4] == ["response 0 to 3", "response 1 to 3"]
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
    filled = fill_groups(loader.generate, 1, 24, between_0_and_1, info=said.append)
    (line,) = said
    assert re.search(says("0 of 1", 10, 14), line)
    assert filled.metrics == {
        "rollout/filter_pass_rate": 1 / 12,
        "rollout/filter_prompts_seen": 12.0,
        "rollout/filter_rounds": 12.0,
    }


def test_rounds_that_differ_in_their_columns_are_an_error_that_names_them() -> None:
    loader = Loader([0.0, 0.5])

    def generate(count: int) -> Batch:
        batch = loader.generate(count)
        return batch if len(loader.asked) == 1 else batch.with_sequences(mood=batch["score"])

    with pytest.raises(ValueError, match="mood"):
        fill_groups(generate, 1, 2, between_0_and_1)


patterns = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=60)


@given(patterns, st.integers(1, 20), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_every_group_that_was_accepted_is_there_once_and_in_order(
    means: list[float], wanted: int, responses: int
) -> None:
    loader = Loader(means, responses)
    filled = loader.fill(wanted)
    # One prompt after the other, until there are enough.
    slow: list[int] = []
    seen = 0
    while len(slow) < wanted and seen < len(means):
        if 0.0 < means[seen] < 1.0:
            slow.append(seen)
        seen += 1
    assert ids_of(filled) == [i for i in slow for _ in range(responses)]
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
    ("keep", "facts"),
    [
        (lambda batch: torch.tensor([True, True, False, True]), ["keep", "prompt 1"]),
        (lambda batch: torch.ones(4), ["keep", "torch.float32", "[4]", "4 responses", "bool"]),
        (lambda batch: torch.ones(2).bool(), ["keep", "torch.bool", "[2]", "4 responses"]),
    ],
)
def test_a_filter_that_cannot_be_is_named(keep: Callable[[Batch], torch.Tensor], facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        fill_groups(Loader([0.5] * 4).generate, 2, 4, keep)


@pytest.mark.parametrize("brought", [1, 3])
def test_answers_to_more_or_fewer_prompts_than_asked_for_are_refused(brought: int) -> None:
    loader = Loader([0.5] * 4)
    with pytest.raises(ValueError, match=says("generate(2)", f"{brought} prompts")):
        fill_groups(lambda _: loader.generate(brought), 2, 4, between_0_and_1)


def test_numbers_that_cannot_be_are_named() -> None:
    generate = Loader([0.5]).generate
    with pytest.raises(ValueError, match="wanted=0"):
        fill_groups(generate, 0, 1, between_0_and_1)
    with pytest.raises(ValueError, match="available=-1"):
        fill_groups(generate, 1, -1, between_0_and_1)


# --- over the steps of a run


class Steps:
    """Eight prompts, of which only those with an odd number teach something, gone through `passes` times."""

    def __init__(
        self,
        passes: int = 1,
        fewest: int = 1,
        teaches: Callable[[int], bool] = lambda i: i % 2 == 1,
        bounds: Sequence[float] = (0.0, 1.0),
    ) -> None:
        rows = [{"input": letter, "label": ""} for letter in "abcdefgh"]
        self.prompts = PromptSource(rows, character_tokenizer("abcdefgh"), 0, shuffle=False)
        self.teaches = teaches
        self.stop_after: int | None = None
        self.said: list[str] = []
        self.filter = PromptFilter(
            self.prompts,
            *bounds,
            option="keep_range",
            passes=passes,
            fewest=fewest,
            stopped=lambda: self.stop_after is not None and self.prompts.taken >= self.stop_after,
            info=self.said.append,
        )

    def response(self, count: int) -> Batch:
        """Two responses to each: one is right where the prompt teaches something, else both are."""
        asked = self.prompts.take(count).repeat(2)
        taught_B = torch.tensor([self.teaches(i) for i in asked["prompt_id"].tolist()])
        is_first_B = torch.arange(2).repeat(count) == 0
        return asked.with_sequences(score=(is_first_B | ~taught_B).float())

    def fill(self, step: int, wanted: int) -> list[int] | None:
        """The prompts of a step, one for each response."""
        batch = self.filter.fill(step, wanted, self.response)
        return None if batch is None else batch["prompt_id"].tolist()


def test_the_last_step_takes_what_the_data_still_has_and_says_so() -> None:
    steps = Steps()
    # 0, 1 and 2 are tried for three prompts, then 3 and 4 for two, then 5 for one.
    assert steps.fill(1, 3) == [1, 1, 3, 3, 5, 5]
    assert not steps.filter.ended
    assert steps.filter.metrics["rollout/filter_prompts_seen"] == 6
    assert steps.fill(2, 3) == [7, 7]
    assert steps.filter.ended
    assert steps.filter.metrics["rollout/filter_pass_rate"] == 0.5
    (line,) = steps.said
    assert re.search(says("2 prompts", "1 have", "0.0", "1.0"), line)


def test_without_bounds_a_prompt_teaches_whose_scores_differ_whatever_they_are() -> None:
    steps = Steps(bounds=())
    response = steps.response
    steps.response = lambda count: (found := response(count)).with_sequences(score=found["score"] * 6 - 5)
    # Scores of 1 and -5, whose mean is no share of right responses.
    assert steps.fill(1, 3) == [1, 1, 3, 3, 5, 5]
    assert steps.fill(2, 3) == [7, 7]
    (line,) = steps.said
    assert re.search(says("2 prompts", "1 have"), line)
    assert "0.0" not in line


def test_prompts_are_tried_again_in_every_pass_under_ids_of_their_own() -> None:
    steps = Steps(passes=2)
    assert steps.fill(1, 5) == [1, 1, 3, 3, 5, 5, 7, 7, 9, 9]
    assert steps.prompts.left(2) == 6
    assert steps.fill(2, 5) == [11, 11, 13, 13, 15, 15]
    assert (steps.filter.ended, steps.prompts.left(2)) == (True, 0)


def test_answers_that_are_too_few_for_the_ranks_are_not_trained_on() -> None:
    steps = Steps(fewest=3)
    assert steps.fill(1, 3) == [1, 1, 3, 3, 5, 5]
    assert steps.fill(2, 3) is None
    assert steps.filter.ended
    assert re.search(says("2 prompts", "1 have", "too few"), steps.said[-1])


def test_data_that_teach_nothing_at_all_are_an_error_which_names_the_option() -> None:
    with pytest.raises(ValueError, match=says("8 prompts", "0 have", "0.0", "1.0", "keep_range")):
        Steps(teaches=lambda _: False).fill(1, 3)


def test_a_step_that_is_stopped_gives_its_prompts_back() -> None:
    steps = Steps()
    assert steps.fill(1, 1) == [1, 1]
    steps.stop_after = 5
    assert steps.fill(2, 3) is None
    assert (steps.prompts.taken, steps.filter.ended, steps.said) == (2, False, [])
    steps.stop_after = None
    assert steps.fill(2, 3) == [3, 3, 5, 5, 7, 7]

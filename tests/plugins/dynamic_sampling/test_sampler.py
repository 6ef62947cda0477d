"""Rounds of dynamic sampling over long data, short data, and data without any prompt that passes."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.batch import Batch
from components.data.prompts import PromptSource
from plugins.demo.tiny_model import character_tokenizer
from plugins.dynamic_sampling.sampler import DynamicSampler
from tests.messages import says


class Steps:
    """A run with `passes` passes over the prompts 0, 1, 2, ...

    If `teaches` returns True for a prompt, only the first of its `responses` scores 1. Otherwise all of them do.
    """

    def __init__(
        self,
        count: int = 8,
        passes: int = 1,
        minimum: int = 1,
        teaches: Callable[[int], bool] = lambda i: i % 2 == 1,
        bounds: tuple[float, float] | tuple[None, None] = (0.0, 1.0),
        responses: int = 2,
    ) -> None:
        rows = [{"input": "a" * (i % 3 + 1), "label": str(i)} for i in range(count)]
        self.prompts = PromptSource(rows, character_tokenizer("a"), 0, shuffle=False)
        self.teaches = teaches
        self.responses = responses
        self.asked: list[int] = []
        """Number of prompts of each round."""
        self.failing: set[int] = set()
        """Prompts whose last response has no reward."""
        self.stop_after: int | None = None
        self.said: list[str] = []
        self.filter = DynamicSampler(
            prompts=self.prompts,
            bounds=bounds,
            option="keep_range",
            passes=passes,
            minimum=minimum,
            stopped=lambda: self.stop_after is not None and self.prompts.taken >= self.stop_after,
            info=self.said.append,
        )

    def response(self, count: int) -> Batch:
        """Return scored responses to the next `count` prompts."""
        self.asked.append(count)
        requested = self.prompts.take(count).repeat(self.responses)
        taught_B = torch.tensor([self.teaches(i) for i in requested["prompt_id"].tolist()])
        is_first_B = torch.arange(self.responses).repeat(count) == 0
        fails_B = torch.tensor([i in self.failing for i in requested["prompt_id"].tolist()])
        failed_B = fails_B & (torch.arange(self.responses).repeat(count) == self.responses - 1)
        return requested.with_sequences(score=(is_first_B | ~taught_B).float()).select(~failed_B)

    def batch(self, count: int) -> Batch | None:
        return self.filter.fill(1, count, self.response)

    def fill(self, step: int, count: int) -> list[int] | None:
        """Return the prompt_id of each response of a step."""
        batch = self.filter.fill(step, count, self.response)
        return None if batch is None else batch["prompt_id"].tolist()

    @property
    def counts(self) -> tuple[float, float]:
        """Number of prompts tried for the last step, and number of its rounds."""
        metrics = self.filter.metrics
        return metrics["rollout/filter_prompts_seen"], metrics["rollout/filter_rounds"]


def test_filtered_prompts_are_replaced_until_the_step_is_full() -> None:
    # Round 1 needs 3 prompts: prompt 1 passes. Round 2 needs 2: prompt 3 passes. Round 3 needs 1: prompt 5 fails. Round
    # 4 needs 1: prompt 6 passes. Prompt 7 is unused.
    steps = Steps(teaches=lambda i: i in (1, 3, 6, 7))
    batch = steps.batch(3)
    assert batch is not None
    assert steps.asked == [3, 2, 1, 1]
    assert batch["prompt_id"].tolist() == [1, 1, 3, 3, 6, 6]
    assert (*steps.counts, steps.filter.ended) == (7, 4, False)
    assert batch["label"] == ["1", "1", "3", "3", "6", "6"]
    assert batch.lengths.tolist() == [2, 2, 1, 1, 1, 1]


def test_responses_without_a_reward_do_not_count_for_the_filter() -> None:
    # The first of three responses is correct, the second is wrong. The third of prompt 0 has no reward, so its score of
    # 0 does not count.
    steps = Steps(teaches=lambda _: True, responses=3, bounds=(0.4, 1.0))
    steps.failing = {0}
    # Prompt 0: 1 of 2 is 0.5. All others: 1 of 3.
    assert steps.fill(1, 1) == [0, 0]
    assert steps.fill(2, 1) is None
    # One of two responses remains, which differs from no other.
    steps = Steps(teaches=lambda _: True, bounds=(None, None))
    steps.failing = {0, 1}
    assert steps.fill(1, 1) == [2, 2]


def test_a_step_filled_in_the_first_round_needs_no_other() -> None:
    steps = Steps(teaches=lambda _: True)
    assert steps.fill(1, 2) == [0, 0, 1, 1]
    assert steps.counts == (2, 1)


def test_prompts_that_passed_are_returned_when_the_data_ends() -> None:
    steps = Steps(5, teaches=lambda i: i in (0, 3))
    assert steps.fill(1, 4) == [0, 0, 3, 3]
    assert (steps.asked, steps.counts, steps.filter.ended) == ([4, 1], (5, 2), True)


def test_a_slow_step_prints_its_progress() -> None:
    # One of twelve prompts passes, and each round requests the one that is missing.
    steps = Steps(24, teaches=lambda i: i % 12 == 11)
    assert steps.fill(7, 1) == [11, 11]
    (line,) = steps.said
    assert re.search(says("step 7", "0 of 1", 10, 14), line)
    assert steps.filter.metrics == {
        "rollout/filter_pass_rate": 1 / 12,
        "rollout/filter_prompts_seen": 12.0,
        "rollout/filter_rounds": 12.0,
    }


def test_rounds_with_different_columns_raise_an_error_that_names_them() -> None:
    steps = Steps(2)

    def response(count: int) -> Batch:
        batch = steps.response(count)
        return batch if len(steps.asked) == 1 else batch.with_sequences(mood=batch["score"])

    with pytest.raises(ValueError, match="mood"):
        steps.filter.fill(1, 1, response)


patterns = st.lists(st.booleans(), min_size=1, max_size=60)


@given(patterns, st.integers(1, 20), st.integers(2, 4))
@settings(max_examples=100, deadline=None)
def test_every_accepted_group_is_returned_once_and_in_order(teaches: list[bool], count: int, responses: int) -> None:
    # Prompts are tried one at a time until there are enough.
    slow: list[int] = []
    seen = 0
    while len(slow) < count and seen < len(teaches):
        if teaches[seen]:
            slow.append(seen)
        seen += 1
    steps = Steps(len(teaches), teaches=lambda i: teaches[i], responses=responses)
    kept = steps.fill(2, count)  # in the first step, no passing prompt is an error
    assert kept == ([i for i in slow for _ in range(responses)] or None)
    assert steps.counts == (seen, len(steps.asked))
    assert steps.prompts.taken == sum(steps.asked) == seen


# --- over the steps of a run


def test_the_last_step_takes_the_remaining_prompts_and_prints_it() -> None:
    steps = Steps()
    # Prompts 0, 1 and 2 are tried for three places, then 3 and 4 for two, then 5 for one.
    assert steps.fill(1, 3) == [1, 1, 3, 3, 5, 5]
    assert not steps.filter.ended
    assert steps.filter.metrics["rollout/filter_prompts_seen"] == 6
    assert steps.fill(2, 3) == [7, 7]
    assert steps.filter.ended
    assert steps.filter.metrics["rollout/filter_pass_rate"] == 0.5
    (line,) = steps.said
    assert re.search(says("2 prompts", "1 have", "0.0", "1.0"), line)


def test_without_bounds_every_prompt_with_different_scores_passes() -> None:
    steps = Steps(bounds=(None, None))
    response = steps.response
    steps.response = lambda count: (batch := response(count)).with_sequences(score=batch["score"] * 6 - 5)
    # Scores of 1 and -5, whose mean is not a share of correct responses.
    assert steps.fill(1, 3) == [1, 1, 3, 3, 5, 5]
    assert steps.fill(2, 3) == [7, 7]
    (line,) = steps.said
    assert re.search(says("2 prompts", "1 have"), line)
    assert "0.0" not in line


def test_every_pass_tries_all_prompts_under_new_ids() -> None:
    steps = Steps(passes=2)
    assert steps.fill(1, 5) == [1, 1, 3, 3, 5, 5, 7, 7, 9, 9]
    assert steps.prompts.left(2) == 6
    assert steps.fill(2, 5) == [11, 11, 13, 13, 15, 15]
    assert (steps.filter.ended, steps.prompts.left(2)) == (True, 0)


def test_fewer_responses_than_ranks_are_not_trained_on() -> None:
    steps = Steps(minimum=3)
    assert steps.fill(1, 3) == [1, 1, 3, 3, 5, 5]
    assert steps.fill(2, 3) is None
    assert steps.filter.ended
    assert re.search(says("2 prompts", "1 have", "too few"), steps.said[-1])


def test_data_without_any_passing_prompt_raises_an_error_that_names_the_option() -> None:
    with pytest.raises(ValueError, match=says("8 prompts", "0 have", "0.0", "1.0", "keep_range")):
        Steps(teaches=lambda _: False).fill(1, 3)


def test_a_stopped_step_returns_its_prompts_to_the_source() -> None:
    steps = Steps()
    assert steps.fill(1, 1) == [1, 1]
    steps.stop_after = 5
    assert steps.fill(2, 3) is None
    assert (steps.prompts.taken, steps.filter.ended, steps.said) == (2, False, [])
    steps.stop_after = None
    assert steps.fill(2, 3) == [3, 3, 5, 5, 7, 7]

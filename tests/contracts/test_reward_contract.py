"""What a reward function or a scorer promises. To hold yours to it: pytest tests/contracts --target FILE.py.

B samples. Whether what came back is as it has to be is judged by the code that training uses: `open_reward`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from components.data.rewards import RewardOutput
from tests.contracts.reward_trial import RewardTrial
from tests.contracts.samples import LONG_TEXT, UNUSUAL_LABELS, UNUSUAL_TEXTS, Sample, repeated

BATCH = 32
"""Workers cut a batch into chunks; of so many samples one chunk has 8, of 8 it has 2."""
OWN_DATA = "If it cannot use generated rows, give it yours with --samples."
RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""A model's numbers may move a little with the batch they are computed in."""


def assert_same(
    scoring: RewardTrial, expected: RewardOutput, found: RewardOutput, samples: list[Sample], why: str
) -> None:
    """Fail with the first sample that got another reward or score; both in the order of the samples."""
    for name, before_B, now_B in (
        ("reward", expected.reward_B.tolist(), found.reward_B.tolist()),
        ("score", expected.score_B.tolist(), found.score_B.tolist()),
    ):
        for sample, before, now in zip(samples, before_B, now_B):
            if now != pytest.approx(before, rel=RELATIVE, abs=ABSOLUTE):
                scoring.fail(f"{why} The {name} of {sample.query!r:.100} was {before:g}, and then {now:g}.")


def steady(scoring: RewardTrial, samples: list[Sample]) -> RewardOutput:
    """Get rewards that others can be compared with."""
    first, again = (scoring.ask(samples, "a batch of 32") for _ in range(2))
    assert_same(scoring, first, again, samples, "nothing can be compared: asked again it gave another reward.")
    return first


def distinct(samples: Sequence[Sample], count: int = 8) -> list[Sample]:
    return list(samples[:count])


def test_a_batch_of_one_is_rewarded(scoring: RewardTrial) -> None:
    assert len(scoring.ask_first(OWN_DATA).reward_B) == 1


def test_each_answer_of_a_batch_gets_one_finite_reward(scoring: RewardTrial) -> None:
    output = scoring.ask(repeated(scoring.samples, BATCH), "a batch of 32", OWN_DATA)
    assert len(output.reward_B) == len(output.score_B) == BATCH


@pytest.mark.parametrize("what", UNUSUAL_TEXTS)
def test_whatever_a_policy_writes_is_rewarded(scoring: RewardTrial, what: str) -> None:
    sample = scoring.samples[0].answered(UNUSUAL_TEXTS[what])
    scoring.ask([sample], what, "A policy writes such things: give a low reward instead.")


@pytest.mark.parametrize("what", UNUSUAL_LABELS)
def test_an_unusual_label_is_rewarded_or_refused_with_a_value_error(scoring: RewardTrial, what: str) -> None:
    label = UNUSUAL_LABELS[what]
    if reason := scoring.refusal(scoring.samples[0].labelled(label), what):
        scoring.fail(
            f"asked for {what}: {reason}. Give a number, or raise a ValueError that says what a label must be."
        )


@pytest.mark.repeatable
def test_an_answer_gets_alone_what_it_gets_in_a_batch(scoring: RewardTrial) -> None:
    samples = distinct(scoring.samples)
    batch = steady(scoring, repeated(samples, BATCH))
    for place, sample in enumerate(samples):
        alone = scoring.ask([sample], "one of its answers alone")
        row = RewardOutput(batch.reward_B[place : place + 1], batch.score_B[place : place + 1], {})
        assert_same(
            scoring,
            row,
            alone,
            [sample],
            "an answer alone got another reward than in a batch; how a batch is "
            "cut depends on the workers, so reward each answer for itself.",
        )


@pytest.mark.repeatable
def test_the_order_of_a_batch_does_not_matter(scoring: RewardTrial) -> None:
    samples = repeated(scoring.samples, BATCH)
    # 13 and 32 have no common factor: every answer gets a place of its own, and other neighbours.
    order = [(13 * place + 5) % BATCH for place in range(BATCH)]
    first = steady(scoring, samples)
    other = scoring.ask([samples[place] for place in order], "the same in another order")
    moved = RewardOutput(first.reward_B[order], first.score_B[order], {})
    assert_same(
        scoring,
        moved,
        other,
        [samples[place] for place in order],
        "in another order the answers got other rewards; return them in the order of the queries.",
    )


@pytest.mark.repeatable
def test_the_same_answers_get_the_same_rewards_again_and_in_a_new_process(scoring: RewardTrial) -> None:
    samples = distinct(scoring.samples)
    first = scoring.ask(samples, "a batch")
    why = "asked {} it gave another reward; make it depend on its arguments alone, or allow that with --allow-random."
    assert_same(scoring, first, scoring.ask(samples, "the same again"), samples, why.format("again"))
    scoring.restart()
    anew = scoring.ask(samples, "the same in a new process")
    assert_same(scoring, first, anew, samples, why.format("in a new process"))


# What a reward function promises beyond that, because it gets whole batches and may return more.


def test_its_arguments_stay_as_they_were(reward_function: RewardTrial) -> None:
    samples = repeated(reward_function.samples, 8)
    advice = "Change a copy: whoever calls it goes on with these lists."
    reward_function.ask(samples, "a batch of 8", advice, watch="arguments")


def test_scores_if_it_gives_them_are_from_0_to_1(reward_function: RewardTrial) -> None:
    samples = repeated(reward_function.samples, 8)
    advice = "Filters and evaluation read 'scores' as 0 for wrong to 1 for right; leave them out, or scale them."
    reward_function.ask(samples, "a batch of 8", advice, watch="scores")


def test_extra_logs_have_the_same_names_for_every_answer(reward_function: RewardTrial) -> None:
    first = reward_function.samples[0]
    samples = [*repeated(reward_function.samples, 9), *(first.answered(text) for text in UNUSUAL_TEXTS.values())]
    output = reward_function.ask(samples, "usual and unusual answers together")
    assert all(len(log_B) == len(samples) for log_B in output.logs.values())


# Last: a function that hangs is asked for nothing more, and this one may be asked too much only here.
def test_a_very_long_answer_is_rewarded_before_the_deadline(scoring: RewardTrial) -> None:
    scoring.ask([scoring.samples[0].answered(LONG_TEXT)], f"an answer of {len(LONG_TEXT):,} characters")

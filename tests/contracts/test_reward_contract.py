"""What a reward function or a scorer promises. To hold yours to it: pytest tests/contracts --target FILE.py.

B samples. Whether what came back is as it has to be is judged by the code that training uses: `open_reward`.
"""

from __future__ import annotations

import pytest

from components.rewards.base import RewardOutput
from tests.contracts.reward_trial import RewardTrial
from tests.contracts.samples import LONG_TEXT, UNUSUAL_LABELS, UNUSUAL_TEXTS, Sample, repeated
from tests.contracts.watched import ChangedArguments, Refused, ScoreOutOfRange

BATCH = 32
"""Workers cut a batch into chunks; of so many samples one chunk has 8, of 8 it has 2."""
ALONE = 8
"""So many are also asked for one by one."""
OWN_DATA = "If it cannot use generated rows, give it yours with --samples."
RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""A model's numbers may move a little with the batch they are computed in."""


def assert_same(
    scoring: RewardTrial, expected: RewardOutput, found: RewardOutput, samples: list[Sample], why: str
) -> None:
    """Fail with the first sample that got another reward or score; all in the order of the samples."""
    for name, before_B, now_B in (
        ("reward", expected.reward_B.tolist(), found.reward_B.tolist()),
        ("score", expected.score_B.tolist(), found.score_B.tolist()),
    ):
        for sample, before, now in zip(samples, before_B, now_B):
            if now != pytest.approx(before, rel=RELATIVE, abs=ABSOLUTE):
                scoring.fail(f"{why} The {name} of {sample.query!r:.100} was {before:g}, and then {now:g}.")


def at(output: RewardOutput, places: list[int]) -> RewardOutput:
    """Take the rewards and scores of some samples, in this order."""
    return RewardOutput(output.reward_B[places], output.score_B[places], {})


def steady(scoring: RewardTrial, samples: list[Sample]) -> RewardOutput:
    """Get rewards that others can be compared with."""
    first, again = (scoring.ask(samples, f"a batch of {BATCH}") for _ in range(2))
    assert_same(scoring, first, again, samples, "nothing can be compared: asked again it gave another reward.")
    return first


def test_a_batch_of_one_is_rewarded(scoring: RewardTrial) -> None:
    scoring.ask_first(OWN_DATA)


def test_each_answer_of_a_batch_gets_one_finite_reward(scoring: RewardTrial) -> None:
    output = scoring.ask(repeated(scoring.samples, BATCH), f"a batch of {BATCH}", OWN_DATA)
    assert len(output.reward_B) == len(output.score_B) == BATCH


@pytest.mark.parametrize("what", UNUSUAL_TEXTS)
def test_whatever_a_policy_writes_is_rewarded(scoring: RewardTrial, what: str) -> None:
    sample = scoring.samples[0].answered(UNUSUAL_TEXTS[what])
    scoring.ask([sample], what, "A policy writes such things: give a low reward instead.")


@pytest.mark.parametrize("what", UNUSUAL_LABELS)
def test_an_unusual_label_is_rewarded_or_refused_with_a_value_error(scoring: RewardTrial, what: str) -> None:
    for line in scoring.watch([scoring.samples[0].labelled(UNUSUAL_LABELS[what])], what):
        # ValueError is an answer: it says what a label has to be. The other two have contracts of their own.
        if not line.startswith((Refused.__name__, ChangedArguments.__name__, ScoreOutOfRange.__name__)):
            scoring.fail(f"asked for {what}: {line}. Give a number, or raise a ValueError that says what it has to be.")


@pytest.mark.repeatable
def test_an_answer_gets_alone_what_it_gets_in_a_batch(scoring: RewardTrial) -> None:
    samples = repeated(scoring.samples, BATCH)
    batch = steady(scoring, samples)
    why = "an answer alone got another reward than in a batch, and how it is cut varies: reward each for itself."
    for place, sample in enumerate(samples[:ALONE]):
        alone = scoring.ask([sample], "one of its answers alone")
        assert_same(scoring, at(batch, [place]), alone, [sample], why)


@pytest.mark.repeatable
def test_the_order_of_a_batch_does_not_matter(scoring: RewardTrial) -> None:
    samples = repeated(scoring.samples, BATCH)
    # 13 and 32 have no common factor: every answer gets a place of its own, and other neighbours.
    order = [(13 * place + 5) % BATCH for place in range(BATCH)]
    moved = [samples[place] for place in order]
    first = steady(scoring, samples)
    other = scoring.ask(moved, "the same in another order")
    why = "in another order the answers got other rewards; return them in the order of the queries."
    assert_same(scoring, at(first, order), other, moved, why)


@pytest.mark.repeatable
def test_the_same_answers_get_the_same_rewards_again_and_in_a_new_process(scoring: RewardTrial) -> None:
    samples = repeated(scoring.samples, ALONE)
    first = scoring.ask(samples, "a batch")
    why = "asked {} it gave another reward; make it depend on its arguments alone, or allow that with --allow-random."
    assert_same(scoring, first, scoring.ask(samples, "the same again"), samples, why.format("again"))
    scoring.restart()
    anew = scoring.ask(samples, "the same in a new process")
    assert_same(scoring, first, anew, samples, why.format("in a new process"))


# What a reward function promises beyond that, because it gets whole batches and may return more.


def test_its_arguments_stay_as_they_were(reward_function: RewardTrial) -> None:
    for line in reward_function.watch(repeated(reward_function.samples, ALONE), "a batch"):
        if ChangedArguments.__name__ in line:
            reward_function.fail(f"{line}. Whoever calls it continues with these lists: change a copy.")


def test_scores_if_it_gives_them_are_from_0_to_1(reward_function: RewardTrial) -> None:
    advice = "Filters and evaluation take 0 for wrong and 1 for right: scale 'scores', or leave them out."
    for line in reward_function.watch(repeated(reward_function.samples, ALONE), "a batch"):
        if ScoreOutOfRange.__name__ in line:
            reward_function.fail(f"{line}. {advice}")


def test_extra_logs_are_one_number_for_each_answer(reward_function: RewardTrial) -> None:
    first = reward_function.samples[0]
    samples = [*repeated(reward_function.samples, 9), *(first.answered(text) for text in UNUSUAL_TEXTS.values())]
    output = reward_function.ask(samples, "usual and unusual answers together")
    assert all(len(log_B) == len(samples) for log_B in output.logs.values())


# Last: a function that hangs is asked for nothing more, and this one may be asked too much only here.
def test_a_very_long_answer_is_rewarded_before_the_deadline(scoring: RewardTrial) -> None:
    scoring.ask([scoring.samples[0].answered(LONG_TEXT)], f"an answer of {len(LONG_TEXT):,} characters")

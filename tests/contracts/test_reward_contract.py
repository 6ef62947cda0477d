"""Contract of reward functions and scorers. To test yours: pytest tests/contracts --target FILE.py.

Return values are checked by the code of training, `open_reward`. B: number of samples.
"""

from __future__ import annotations

import pytest

from components.rewards.base import RewardOutput
from tests.contracts.reward_trial import RewardTrial
from tests.contracts.samples import LONG_TEXT, UNUSUAL_LABELS, UNUSUAL_TEXTS, Sample, repeated
from tests.contracts.watched import ChangedArguments, Refused, ScoreOutOfRange

BATCH = 32
"""Number of samples of a batch. Workers split it into chunks of 8 samples, and a batch of 8 into chunks of 2."""
ALONE = 8
"""Number of samples that are also scored one by one."""
OWN_DATA = "If it cannot use generated rows, pass your own with --samples."
# Tolerances, because the numbers of a model may vary slightly with the batch.
RELATIVE = 1e-4
ABSOLUTE = 1e-6


def assert_same(
    scoring: RewardTrial, expected: RewardOutput, actual: RewardOutput, samples: list[Sample], problem: str
) -> None:
    """Fail with the first sample whose reward or score differs. All are in the order of the samples."""
    for name, before_B, now_B in (
        ("reward", expected.reward_B.tolist(), actual.reward_B.tolist()),
        ("score", expected.score_B.tolist(), actual.score_B.tolist()),
    ):
        for sample, before, now in zip(samples, before_B, now_B):
            if now != pytest.approx(before, rel=RELATIVE, abs=ABSOLUTE):
                scoring.fail(f"{problem} The {name} of {sample.query!r:.100} was {before:g}, and then {now:g}.")


def at(output: RewardOutput, places: list[int]) -> RewardOutput:
    """Return the rewards and scores of some samples, in this order."""
    return RewardOutput(output.reward_B[places], output.score_B[places], {})


def steady(scoring: RewardTrial, samples: list[Sample]) -> RewardOutput:
    """Return rewards that others can be compared with, after a check that they are repeatable."""
    first, again = (scoring.ask(samples, f"a batch of {BATCH}") for _ in range(2))
    assert_same(scoring, first, again, samples, "nothing can be compared: a second call returned another reward.")
    return first


def test_a_batch_of_one_is_rewarded(scoring: RewardTrial) -> None:
    scoring.ask_first(OWN_DATA)


def test_each_response_of_a_batch_gets_one_finite_reward(scoring: RewardTrial) -> None:
    output = scoring.ask(repeated(scoring.samples, BATCH), f"a batch of {BATCH}", OWN_DATA)
    assert len(output.reward_B) == len(output.score_B) == BATCH


@pytest.mark.parametrize("text", UNUSUAL_TEXTS)
def test_unusual_texts_of_a_policy_are_rewarded(scoring: RewardTrial, text: str) -> None:
    sample = scoring.samples[0].answered(UNUSUAL_TEXTS[text])
    scoring.ask([sample], text, "Policies write such texts: return a low reward instead.")


@pytest.mark.parametrize("label", UNUSUAL_LABELS)
def test_an_unusual_label_is_rewarded_or_rejected_with_a_value_error(scoring: RewardTrial, label: str) -> None:
    for fault in scoring.watch([scoring.samples[0].labelled(UNUSUAL_LABELS[label])], label):
        # A ValueError is allowed, because it describes valid labels. The other two have their own contracts.
        if not fault.startswith((Refused.__name__, ChangedArguments.__name__, ScoreOutOfRange.__name__)):
            advice = "Return a number, or raise a ValueError that describes valid labels."
            scoring.fail(f"asked for {label}: {fault}. {advice}")


@pytest.mark.repeatable
def test_a_response_has_the_same_reward_alone_and_in_a_batch(scoring: RewardTrial) -> None:
    samples = repeated(scoring.samples, BATCH)
    batch = steady(scoring, samples)
    problem = "a response alone got another reward than in a batch, whose size varies: reward each independently."
    for place, sample in enumerate(samples[:ALONE]):
        alone = scoring.ask([sample], "one response alone")
        assert_same(scoring, at(batch, [place]), alone, [sample], problem)


@pytest.mark.repeatable
def test_the_order_of_a_batch_does_not_matter(scoring: RewardTrial) -> None:
    samples = repeated(scoring.samples, BATCH)
    # A permutation, because 13 and 32 have no common factor. It also changes the neighbours of every response.
    order = [(13 * place + 5) % BATCH for place in range(BATCH)]
    moved = [samples[place] for place in order]
    first = steady(scoring, samples)
    other = scoring.ask(moved, "the same batch in another order")
    problem = "in another order the responses got other rewards; return rewards in the order of the queries."
    assert_same(scoring, at(first, order), other, moved, problem)


@pytest.mark.repeatable
def test_equal_calls_give_equal_rewards_also_in_a_new_process(scoring: RewardTrial) -> None:
    samples = repeated(scoring.samples, ALONE)
    first = scoring.ask(samples, "a batch")
    problem = "called {} it gave another reward; let it depend on its arguments only, or set --allow-random."
    assert_same(scoring, first, scoring.ask(samples, "the same batch again"), samples, problem.format("again"))
    scoring.restart()
    anew = scoring.ask(samples, "the same batch in a new process")
    assert_same(scoring, first, anew, samples, problem.format("in a new process"))


# Further contracts of reward functions, which receive whole batches and may return more than rewards.


def test_the_arguments_are_not_changed(reward_function: RewardTrial) -> None:
    for fault in reward_function.watch(repeated(reward_function.samples, ALONE), "a batch"):
        if ChangedArguments.__name__ in fault:
            reward_function.fail(f"{fault}. The caller continues to use these lists: change a copy.")


def test_scores_are_from_0_to_1(reward_function: RewardTrial) -> None:
    advice = "Filters and evaluation take 0 for wrong and 1 for right: scale 'scores', or omit them."
    for fault in reward_function.watch(repeated(reward_function.samples, ALONE), "a batch"):
        if ScoreOutOfRange.__name__ in fault:
            reward_function.fail(f"{fault}. {advice}")


def test_extra_logs_have_one_number_per_response(reward_function: RewardTrial) -> None:
    first = reward_function.samples[0]
    samples = [*repeated(reward_function.samples, 9), *(first.answered(text) for text in UNUSUAL_TEXTS.values())]
    output = reward_function.ask(samples, "usual and unusual responses together")
    assert all(len(log_B) == len(samples) for log_B in output.logs.values())


# The last contract, because a function that hangs is not called again, and only this text may be too long for it.
def test_a_very_long_response_is_rewarded_before_the_deadline(scoring: RewardTrial) -> None:
    scoring.ask([scoring.samples[0].answered(LONG_TEXT)], f"a response of {len(LONG_TEXT):,} characters")

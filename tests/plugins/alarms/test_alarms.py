"""Each alarm is raised beyond its limit and not below it, once, with the metric names of any system."""

import math
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from plugins.alarms.alarms import ALARMS, NOT_A_NUMBER, Alarms, advice
from tests.messages import says
from training.options.described import options_of

CONFIGS = {
    "grpo": "GRPOConfig",
    "reinforce_pp": "ReinforceConfig",
    "multi_turn": "MultiTurnConfig",
    "openrlhf_ppo": "PPOConfig",
    "verl_ppo": "VerlPPOConfig",
}


SCHEMAS = {
    recipe: [option.name for option in options_of(getattr(import_module(f"recipes.{recipe}.config"), name))]
    for recipe, name in CONFIGS.items()
}
ALL = {name for names in SCHEMAS.values() for name in names}


def sounded(steps: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Name and step of each alarm. Steps count from 1."""
    alarms = Alarms(ALL)
    return [(event.alarm, event.step) for i, step in enumerate(steps, 1) for event in alarms.look(i, step)]


def clipped(share: float, kl: float) -> dict[str, float]:
    return {"actor/clip_frac": share, "actor/approx_kl": kl}


def open_to(entropy: float, score: float) -> dict[str, float]:
    return {"actor/entropy": entropy, "reward/score": score}


def apart(gap: float, staleness: float) -> dict[str, float]:
    return {"rollout/logprob_gap_mean": gap, "rollout/staleness_max": staleness}


def ratio(first: float, staleness: float) -> dict[str, float]:
    return {"actor/first_ratio_mean": first, "rollout/staleness_max": staleness}


def equal(share: float, score: float) -> dict[str, float]:
    return {"reward/zero_variance_share": share, "reward/score": score}


def cut(share: float) -> dict[str, float]:
    return {"rollout/truncated_share": share}


@pytest.mark.parametrize(
    ("name", "at", "steps"),
    [
        ("kl", 2, [{"actor/approx_kl": 0.5}, {"actor/approx_kl": 0.51}]),
        ("drift", 3, [{"actor/kl_to_reference": kl} for kl in (0.01, 3.0, 3.1)]),
        ("start", 1, [{"actor/kl_to_reference": -0.011}]),
        ("first_ratio", 3, [ratio(0.991, 0.0), ratio(0.98, 0.0), ratio(1.02, 0.0)]),
        ("clipping", 1, [clipped(0.31, 0.06)]),
        ("entropy", 4, [open_to(1.0, 0.1), open_to(0.1, 0.1), open_to(0.09, 0.1), open_to(0.09, 0.1)]),
        ("mismatch", 3, [apart(0.05, 0.0), apart(0.06, 0.0), apart(0.06, 0.0)]),
        ("mismatch", 3, [apart(1.0, 2.0), apart(1.1, 2.0), apart(1.1, 2.0)]),
        ("equal_groups", 4, [equal(0.9, 0.0), *[equal(0.91, 0.0)] * 3]),
        # All correct from the first step is not a success: there is nothing to learn.
        ("equal_groups", 3, [equal(1.0, 1.0)] * 3),
        ("failed_rewards", 3, [{"reward/failed": 0.0}, *[{"reward/failed": 1.0}] * 2]),
        ("router", 3, [{"actor/router_imbalance_max": imbalance} for imbalance in (0.9, 0.91, 0.91)]),
        ("length", 3, [cut(0.5), cut(0.51), cut(0.51)]),
        ("not_a_number", 2, [{"mine": 1.0}, {"mine": math.nan}]),
    ],
)
def test_an_alarm_is_raised_beyond_its_limit(name: str, at: int, steps: list[dict[str, Any]]) -> None:
    assert sounded(steps) == [(name, at)]
    # The alarm is raised once, although the next steps have the same values.
    assert sounded([*steps, steps[-1], steps[-1]]) == [(name, at)]


@pytest.mark.parametrize(
    "steps",
    [
        [clipped(0.3, 0.2)],
        # a narrow range of scores, and a policy that hardly changes; certain and correct; not in consecutive steps; old
        # weights
        [clipped(0.6, 0.05)] * 9,
        [open_to(1.0, 0.1), *[open_to(0.01, 0.9)] * 9],  # sure, and right
        [apart(0.06, 0.0), apart(0.04, 0.0)] * 9,  # not in a row
        [apart(0.9, 1.0)] * 9,  # of older weights
        [ratio(0.9, 1.0)] * 9,
        [{"actor/kl_to_reference": kl} for kl in (0.0, 0.2)],
        [equal(0.5, 0.3), *[equal(1.0, 0.9)] * 9],  # the policy has learnt the task
        [cut(0.6), cut(0.4)] * 9,
        [{"reward/failed": 1.0}, {"reward/failed": 0.0}] * 9,  # a reward server with temporary failures
    ],
)
def test_healthy_metrics_raise_no_alarm(steps: list[dict[str, Any]]) -> None:
    assert sounded(steps) == []


def test_metric_names_of_verl_are_accepted_and_the_text_has_the_numbers() -> None:
    (event,) = Alarms(ALL).look(7, {"actor/ppo_kl": 2.0, "actor/pg_clipfrac": 0.1})
    assert (event.alarm, event.step) == ("kl", 7)
    assert re.search(says("2.00", "actor/approx_kl"), event.text)
    assert "train.learning_rate" in event.advice
    alarms = Alarms(ALL)
    assert alarms.look(1, {"response_length/clip_ratio": 0.8}) == []
    (event,) = alarms.look(2, {"response_length/clip_ratio": 0.8})
    assert "80%" in event.text


def test_an_alarm_of_several_steps_counts_those_that_have_its_metric() -> None:
    # A step that trains only the critic has no entropy.
    entropies = [1.0, 0.05, None, 0.05]
    assert sounded([{} if x is None else open_to(x, 0.0) for x in entropies]) == [("entropy", 4)]


def test_non_numeric_metrics_are_ignored_and_non_finite_ones_are_named() -> None:
    watched = list(dict.fromkeys(alarm.watches for alarm in ALARMS))
    for odd in (None, "text", [1.0], {"a": 1}):
        assert sounded([dict.fromkeys(watched, odd), {}]) == []
    # A value that is not finite is neither compared with a limit nor used as an initial value.
    (event,) = Alarms(ALL).look(1, dict.fromkeys(watched, math.inf))
    assert event.alarm == "not_a_number"
    assert re.search(says(*watched[:3]), event.text)
    assert f"{watched[3]}," not in event.text
    assert sounded([{"actor/entropy": math.nan}, open_to(1.0, 0.0), *[open_to(0.05, 0.0)] * 2]) == [
        ("not_a_number", 1),
        ("entropy", 4),
    ]


def test_a_policy_with_zero_initial_entropy_raises_no_alarm() -> None:
    assert sounded([open_to(0.0, 0.0)] * 5) == []


def test_suggested_options_exist() -> None:
    for alarm in (*ALARMS, NOT_A_NUMBER):
        named = {name for remedy in alarm.remedies for name in re.findall(r"\{(.*?)\}", remedy)}
        assert named <= ALL, alarm.name
        # Every recipe has a suggestion.
        assert all(advice(alarm, names) for names in SCHEMAS.values()), alarm.name


@pytest.mark.parametrize("recipe", CONFIGS)
def test_suggestions_name_only_options_of_the_recipe(recipe: str) -> None:
    for alarm in (*ALARMS, NOT_A_NUMBER):
        remedies = advice(alarm, SCHEMAS[recipe])
        assert [
            name for name in ALL - set(SCHEMAS[recipe]) if re.search(rf"(?<![\w.]){re.escape(name)}\b", remedies)
        ] == []


def test_suggestions_omit_options_that_do_not_exist() -> None:
    entropy = next(alarm for alarm in ALARMS if alarm.name == "entropy")
    remedies = advice(entropy, {"train.learning_rate", "algorithm.clip_high"})
    assert remedies == "lower the learning rate (train.learning_rate); raise the upper clip range (algorithm.clip_high)"


def test_a_score_below_its_initial_value_raises_an_alarm_and_noise_does_not() -> None:
    def sounded(name: str, scores: list[float]) -> list[tuple[str, int]]:
        alarms = Alarms({"train.learning_rate"})
        events = [event for step, x in enumerate(scores, 1) for event in alarms.look(step, {name: x, "step": step})]
        return [(event.alarm, event.step) for event in events]

    assert sounded("eval/score", [0.476, 0.54, 0.17]) == [("falling_evaluation", 3)]
    assert sounded("reward/score", [0.476, 0.54, 0.17, 0.15]) == [("falling_reward", 4)]
    assert sounded("eval/score", [0.19, 0.5, 0.86, 0.25]) == []  # the score is still above its initial value
    assert sounded("reward/score", [0.5, 0.55, 0.4, 0.35, 0.4]) == []
    assert sounded("reward/score", [0.06, 0.03, 0.0, 0.03]) == []  # such a small difference is noise


STEADY = [0.2, 0.22, 0.31, 0.4, 0.52, 0.6, 0.71, 0.78, 0.8, 0.79, 0.81, 0.8]


@pytest.mark.parametrize(
    ("metric", "scores", "alarm", "at"),
    [
        ("eval/score", [0.2, 0.5, 0.8, 0.3, 0.31, 0.29], "lost_evaluation", 6),
        # recovers in between a gain of 0.19 is too small three quarters of 0.6 is 0.45
        ("eval/score", [0.2, 0.5, 0.8, 0.3, 0.31, 0.6, 0.29], None, 0),
        ("eval/score", [0.2, 0.3, 0.39, 0.21, 0.21, 0.21], None, 0),  # a gain of 0.19 is small
        ("eval/score", [0.2, 0.5, 0.8, 0.36, 0.36, 0.36], None, 0),  # three quarters of 0.6 are 0.45
        ("reward/score", [*STEADY, 0.3, 0.25, 0.28], "lost_reward", 15),
        ("reward/score", [*STEADY, 0.5, 0.5, 0.5, 0.5], None, 0),
        # Random gains of a policy that learns nothing, with 16 responses per evaluation.
        (
            "reward/score",
            [0.25, 0.5, 0.31, 0.62, 0.75, 0.5, 0.69, 0.38, 0.44, 0.31, 0.5, 0.25, 0.44, 0.31] * 3,
            None,
            0,
        ),
    ],
)
def test_a_lost_gain_raises_an_alarm_and_noise_does_not(
    metric: str, scores: list[float], alarm: str | None, at: int
) -> None:
    assert sounded([{metric: score} for score in scores]) == ([(alarm, at)] if alarm else [])


def test_a_resumed_run_restores_its_best_score_of_any_step(tmp_path: Path) -> None:
    lines = [*([0.2] * 3), *([0.8] * 200), *([0.5] * 20)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "reward/score": {x}}}\n' for i, x in enumerate(lines))
    )
    alarms = Alarms(ALL)
    alarms.recall(tmp_path)
    alarm_names = [event.alarm for step in range(3) for event in alarms.look(300 + step, {"reward/score": 0.25})]
    assert alarm_names == ["lost_reward"]


def test_a_large_kl_of_one_optimizer_step_raises_an_alarm() -> None:
    steps = [{"actor/approx_kl": 0.0, "actor/step_kl": kl} for kl in (0.5, 0.51)]
    assert sounded(steps) == [("step_kl", 2)]


def test_a_strong_increase_of_entropy_raises_an_alarm() -> None:
    alarms = Alarms({"train.learning_rate"})
    alarm_events = [alarms.look(step, {"actor/entropy": x}) for step, x in enumerate([0.5, 0.9, 1.8, 2.0], 1)]
    assert [[event.alarm for event in events] for events in alarm_events] == [[], [], [], ["entropy_explosion"]]

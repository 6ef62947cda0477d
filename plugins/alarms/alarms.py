"""Alarms: warnings about the metrics of a training step, each raised once per run, with advice on what to try.

A threshold marks a run that is failing, not one that could be improved. No demonstration run comes near a threshold.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.tracking.event_types import AlarmEvent
from training.tracking.metrics import canonical_name
from training.tracking.serialization import json_lines

Numbers = Mapping[str, float]
"""Finite metrics of a step, by this project's names."""

MOST_KL = 0.5
"""Maximum KL in nats per token between the policy before and after a step. Demonstrations: up to 0.21, in the first
step."""
MOST_DRIFT = 3.0
"""Maximum KL to the reference model, in nats per token. Demonstrations: up to 0.51."""
MOST_CLIPPED = 0.3
"""Maximum share of clipped tokens in a step whose KL exceeds MOVES. Demonstrations: up to 0.15."""
MOVES = 0.05
"""KL in nats per token above which the share of clipped tokens is checked. A narrow clip range, such as GSPO's, clips
half of the tokens even if the policy barely changes."""
LEAST_ENTROPY = 0.1
"""Minimum entropy as a fraction of the first step's entropy. Demonstrations: down to 0.21 before 90 % of their
responses are right."""
MOST_ENTROPY = 3.0
"""Maximum entropy as a multiple of the first step's entropy. Demonstrations of grpo and reinforce_pp (seeds 1 and 2,
15 steps): at most 1.06."""
LEAST_EXPLODED = 1.0
"""Entropy in nats per token below which `entropy_explosion` is not raised."""
LEAST_SCORE = 0.1
"""Score below which changes are treated as noise."""
MOST_FALL = 0.4
"""Maximum drop of a score, as a fraction of the best score so far."""
MOST_LOST = 0.75
"""Maximum share of the gain (best score minus first score) that may be lost again."""
LEAST_GAIN = 0.2
"""Minimum gain of a held-out score for which losing the gain raises an alarm."""
NOISES = 4.0
"""Minimum gain, as a multiple of the noise of a step's score, that counts as progress. In 200 simulated runs of 300
steps without any progress, 0.5 to 8 % had a larger gain and lost it (8 to 64 responses, a score of 0.2 or 0.5)."""
LOST_IN_A_ROW = 3
"""Number of consecutive evaluations, or of averaged steps, in which the gain has to be lost."""
REMEMBERED = 200
"""Number of most recent scores from which the noise is estimated."""
SOLVED = 0.9
"""Score from which low entropy and equal rewards within a group are expected and raise no alarm."""
MOST_GAP = 0.05
"""Maximum difference in nats per token between the log-probabilities of engine and trainer with the same weights.
Rounding to bfloat16 causes about 0.01."""
MOST_STALE_GAP = 1.0
"""Maximum difference in nats per token if responses were sampled with older weights."""
MOST_EQUAL = 0.9
"""Maximum share of responses in groups (responses to one prompt) with equal rewards."""
MOST_TRUNCATED = 0.5
"""Maximum share of truncated responses."""
MOST_IMBALANCE = 0.9
"""Imbalance of the expert loads, 0 to 1, above which nearly all tokens are routed to the same experts."""
MOST_AT_START = 0.01
"""Maximum KL to the reference in nats per token before the first update, and maximum distance of the ratio from 1
before the first update of a step. Both include rounding to bfloat16."""

_RISING = ("eval/score", "reward/score")
"""Metrics whose history is tracked. Alarms read the best value so far as `best:<name>`, and `lost:<name>`, which is 1
if most of a gain is lost."""
_NAME = re.compile(r"\{([\w.]+)\}")
SAME_PRECISION = "use the same precision for both ({train.precision})"
LOWER_RATE = "lower the learning rate ({train.learning_rate})"
FEWER_UPDATES = "use fewer optimizer steps (a larger {train.mini_batch_size}, fewer {train.epochs})"
SMALLER_NORM = "clip gradients at a smaller norm ({train.max_grad_norm})"


@dataclass(frozen=True)
class Alarm:
    """A warning about one metric."""

    name: str
    watches: str
    """Name of the metric. Steps without it are skipped."""
    when: str
    """Condition of the alarm, in words."""
    text: str
    """Message of the alarm, with the value of this step as `{now}` and that of the first step as `{first}`."""
    remedies: Sequence[str]
    """Pieces of advice, with names of options in braces."""
    sounds: Callable[[Numbers, Numbers], bool]
    """(metrics of this step, first value of each metric) -> True if the condition holds in this step."""
    steps: int = 1
    """Number of consecutive steps in which the condition has to hold."""


def _moves_far(now: Numbers, _: Numbers) -> bool:
    return now["actor/clip_frac"] > MOST_CLIPPED and now.get("actor/approx_kl", 0.0) > MOVES


def _is_sure_of_wrong_responses(now: Numbers, first: Numbers) -> bool:
    few = now["actor/entropy"] < LEAST_ENTROPY * first["actor/entropy"]
    return few and now.get("reward/score", 0.0) < SOLVED


def _differs_from_engine(now: Numbers, _: Numbers) -> bool:
    most = MOST_GAP
    if now.get("rollout/staleness_max", 0.0) > 0:
        # The policy has changed since these responses were sampled, which causes a larger difference by itself.
        most = MOST_STALE_GAP
    return now["rollout/logprob_gap_mean"] > most


def _is_no_ratio_of_one(now: Numbers, _: Numbers) -> bool:
    is_stale = now.get("rollout/staleness_max", 0.0) > 0
    return not is_stale and abs(now["actor/first_ratio_mean"] - 1) > MOST_AT_START


def _is_all_equal(now: Numbers, first: Numbers) -> bool:
    name = "reward/zero_variance_share"
    # Equal rewards are expected once a task is solved. From the first step on they mean that there is no signal.
    has_learnt = now.get("reward/score", 0.0) >= SOLVED and first[name] <= MOST_EQUAL
    return now[name] > MOST_EQUAL and not has_learnt


def _has_fallen(name: str) -> Callable[[Numbers, Numbers], bool]:
    def sounds(now: Numbers, first: Numbers) -> bool:
        # The score has to be below its start too. Otherwise losing a part of a small gain would raise the alarm.
        best = now.get(f"best:{name}", now[name])
        gained = best - first[name]
        return best >= LEAST_SCORE and now[name] < best - max(MOST_FALL * abs(best), gained)

    return sounds


def _has_lost_gain(name: str) -> Callable[[Numbers, Numbers], bool]:
    has_fallen = _has_fallen(name)
    # `_has_fallen` raises its own alarm for a score below its start, so a second one would repeat it.
    return lambda now, first: now[f"lost:{name}"] > 0 and not has_fallen(now, first)


def _explodes(now: Numbers, first: Numbers) -> bool:
    return now["actor/entropy"] > max(MOST_ENTROPY * first["actor/entropy"], LEAST_EXPLODED)


ALARMS = (
    Alarm(
        name="falling_evaluation",
        watches="eval/score",
        when=f"more than {MOST_FALL:.0%} below the best so far, and below the first",
        text="the score on held-out prompts is down to {now:.3f}, and was {first:.3f} at the start: the policy gets "
        "worse",
        remedies=(LOWER_RATE, "go back to the best checkpoint (`best` in checkpoints/)", FEWER_UPDATES),
        sounds=_has_fallen("eval/score"),
    ),
    Alarm(
        name="falling_reward",
        watches="reward/score",
        when=f"more than {MOST_FALL:.0%} below the best so far, and below the first, twice in a row",
        text="the score of the responses is down to {now:.3f}, and was {first:.3f} in the first step: the policy gets "
        "worse",
        remedies=(LOWER_RATE, FEWER_UPDATES, SMALLER_NORM),
        sounds=_has_fallen("reward/score"),
        steps=2,
    ),
    Alarm(
        name="lost_evaluation",
        watches="eval/score",
        when=f"in {LOST_IN_A_ROW} evaluations in a row more than {MOST_LOST:.0%} of a gain of {LEAST_GAIN} or more is "
        "lost",
        text="the score on held-out prompts is down to {now:.3f}, near the {first:.3f} of the start: most of what the "
        "policy had gained is lost",
        remedies=(LOWER_RATE, "go back to the best checkpoint (`best` in checkpoints/)", FEWER_UPDATES),
        sounds=_has_lost_gain("eval/score"),
    ),
    Alarm(
        name="lost_reward",
        watches="reward/score",
        when=f"the mean of {LOST_IN_A_ROW} steps has lost more than {MOST_LOST:.0%} of a gain over {LEAST_SCORE} and "
        f"{NOISES:g} times the noise between steps",
        text="the score of the responses is down to {now:.3f}, near the {first:.3f} of the first step: most of what "
        "the policy had gained is lost",
        remedies=(LOWER_RATE, FEWER_UPDATES, SMALLER_NORM),
        sounds=_has_lost_gain("reward/score"),
    ),
    Alarm(
        name="entropy_explosion",
        watches="actor/entropy",
        when=f"over {MOST_ENTROPY:g} times the first step's and over {LEAST_EXPLODED:g}, twice in a row",
        text="the policy's entropy is up to {now:.3f} nats per token from {first:.3f}: its responses become random",
        remedies=(LOWER_RATE, "lower the weight of the entropy bonus ({algorithm.entropy_coef})"),
        sounds=_explodes,
        steps=2,
    ),
    Alarm(
        name="kl",
        watches="actor/approx_kl",
        when=f"over {MOST_KL}",
        text="the policy moved {now:.2f} nats per token within one step, too far from the responses it learns from",
        remedies=(LOWER_RATE, FEWER_UPDATES, SMALLER_NORM),
        sounds=lambda now, _: now["actor/approx_kl"] > MOST_KL,
    ),
    Alarm(
        name="step_kl",
        watches="actor/step_kl",
        when=f"over {MOST_KL}",
        text="one optimizer step moved the policy {now:.2f} nats per token away from the one that sampled the "
        "responses, too far to learn from them",
        remedies=(LOWER_RATE, SMALLER_NORM),
        sounds=lambda now, _: now["actor/step_kl"] > MOST_KL,
    ),
    Alarm(
        name="drift",
        watches="actor/kl_to_reference",
        when=f"over {MOST_DRIFT:g}",
        text="the KL to the reference is {now:.2f} nats per token: the policy may have lost abilities of the initial "
        "model",
        remedies=("raise the weight of the KL to the reference ({algorithm.kl_coef})", LOWER_RATE),
        sounds=lambda now, _: now["actor/kl_to_reference"] > MOST_DRIFT,
    ),
    Alarm(
        name="start",
        watches="actor/kl_to_reference",
        when=f"more than {MOST_AT_START} from 0 in step 1",
        text="the KL to the reference is {now:.3f} nats per token before the first update, where it must be 0: policy "
        "and reference have different weights, or are computed differently",
        remedies=(SAME_PRECISION,),
        sounds=lambda now, _: now["step"] == 1 and abs(now["actor/kl_to_reference"]) > MOST_AT_START,
    ),
    Alarm(
        name="first_ratio",
        watches="actor/first_ratio_mean",
        when=f"more than {MOST_AT_START} from 1, twice in a row, where no response is of older weights",
        text="the ratio to the old policy is {now:.3f} in the first optimizer step of a step, before any update, where "
        "it must be 1",
        remedies=(SAME_PRECISION, "use the same packing for both ({train.packing})"),
        sounds=_is_no_ratio_of_one,
        steps=2,
    ),
    Alarm(
        name="clipping",
        watches="actor/clip_frac",
        when=f"over {MOST_CLIPPED}, with `actor/approx_kl` over {MOVES}",
        text="{now:.0%} of the tokens are clipped, so little is learned from the responses",
        remedies=(LOWER_RATE, FEWER_UPDATES),
        sounds=_moves_far,
    ),
    Alarm(
        name="entropy",
        watches="actor/entropy",
        when=f"under {LEAST_ENTROPY} of the first step's, twice in a row, with `reward/score` under {SOLVED}",
        text="the policy's entropy fell from {first:.3f} to {now:.3f} nats per token before its responses are right: "
        "all responses are nearly the same, so there is nothing new to learn from",
        remedies=(
            LOWER_RATE,
            "raise the upper clip range ({algorithm.clip_high})",
            "raise the weight of the KL to the reference ({algorithm.kl_coef})",
            "raise the weight of the entropy bonus ({algorithm.entropy_coef})",
        ),
        sounds=_is_sure_of_wrong_responses,
        steps=2,
    ),
    Alarm(
        name="mismatch",
        watches="rollout/logprob_gap_mean",
        when=f"over {MOST_GAP}, twice in a row; over {MOST_STALE_GAP:g} where responses are of older weights",
        text="log-probabilities of engine and trainer differ by {now:.3f} nats per token for the same responses: the "
        "policy learns from responses that it would not give",
        remedies=(
            "check that the engine has the trainer's weights ({rollout.verify_weight_sync})",
            "sample from the full vocabulary ({rollout.top_p}=1, {rollout.top_k}=0)",
            SAME_PRECISION,
            "correct the loss for the difference ({algorithm.correction})",
        ),
        sounds=_differs_from_engine,
        steps=2,
    ),
    Alarm(
        name="router",
        watches="actor/router_imbalance_max",
        when=f"over {MOST_IMBALANCE}, twice in a row",
        text="the router of a layer sends nearly all tokens to the same experts (imbalance {now:.2f}, {first:.2f} in "
        "the first step): the other experts of the layer are no longer trained",
        remedies=("raise the weight of the load-balancing loss ({train.router_aux_loss_coef})", LOWER_RATE),
        sounds=lambda now, _: now["actor/router_imbalance_max"] > MOST_IMBALANCE,
        steps=2,
    ),
    Alarm(
        name="equal_groups",
        watches="reward/zero_variance_share",
        when=f"over {MOST_EQUAL}, three times in a row, unless `reward/score` rose to {SOLVED} or more meanwhile",
        text="{now:.0%} of the responses have the same reward as all others to their prompt, so there is no signal",
        remedies=(
            "look at the responses: the reward may never be given, or always",
            "use prompts that the policy solves sometimes",
            "sample more responses per prompt ({samples_per_prompt}) at temperature 1 ({rollout.temperature})",
            "exclude such prompts ({algorithm.filter_range})",
            "exclude such prompts ({algorithm.dynamic_sampling})",
        ),
        sounds=_is_all_equal,
        steps=3,
    ),
    Alarm(
        name="failed_rewards",
        watches="reward/failed",
        when="over 0, twice in a row",
        text="the reward of {now:.0f} responses of this step could not be computed; they are excluded",
        remedies=(
            "read the reason in the messages above, and correct the reward",
            "raise the timeout of the reward ({reward.timeout_s})",
            "raise the timeout of the environment ({agent.step_timeout_s})",
        ),
        sounds=lambda now, _: now["reward/failed"] > 0,
        steps=2,
    ),
    Alarm(
        name="length",
        watches="rollout/truncated_share",
        when=f"over {MOST_TRUNCATED}, twice in a row",
        text="{now:.0%} of the responses are cut off at the limit, mostly before what the reward looks for",
        remedies=(
            "allow longer responses ({rollout.max_new_tokens})",
            "allow more turns ({agent.max_turns})",
            "take something off long ones ({algorithm.overlong_buffer})",
        ),
        sounds=lambda now, _: now["rollout/truncated_share"] > MOST_TRUNCATED,
        steps=2,
    ),
)
NOT_A_NUMBER = Alarm(
    name="not_a_number",
    watches="every metric",
    when="not finite",
    text="{names} is not a finite number",
    remedies=("look for extreme values in the rewards of this step (its rollouts are in the run's folder)", LOWER_RATE),
    sounds=lambda _now, _first: False,  # `Alarms.look` raises this alarm, because conditions get only finite metrics
)


class _EvaluationCourse:
    """History of a score that is the mean over many responses to the same prompts."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LOST_IN_A_ROW)
        self._first: float | None = None
        self._best = -math.inf

    def has_lost(self, score: float) -> bool:
        """Add a score. Return True if each of the latest scores has lost most of a clear gain."""
        self._latest.append(score)
        if self._first is None:
            self._first = score
        self._best = max(self._best, score)
        gain = self._best - self._first
        # The highest of the latest scores decides, because a single evaluation can be low by chance.
        return gain >= LEAST_GAIN and max(self._latest) < self._best - MOST_LOST * gain


class _StepCourse:
    """History of a score that is the mean over a few responses, with other prompts in each step.

    It compares means of the latest steps, and estimates the noise from the changes between steps.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LOST_IN_A_ROW)
        self._changes: deque[float] = deque(maxlen=REMEMBERED)
        self._first: float | None = None
        self._best = -math.inf

    def has_lost(self, score: float) -> bool:
        """Add a score. Return True if the mean of the latest scores has lost most of a gain that exceeds the noise."""
        if self._latest:
            self._changes.append(abs(score - self._latest[-1]))
        self._latest.append(score)
        if len(self._latest) < LOST_IN_A_ROW:
            return False
        mean = statistics.fmean(self._latest)
        if self._first is None:
            self._first = mean
        self._best = max(self._best, mean)
        gain = self._best - self._first
        # The median of |x - y| is 0.954 standard deviations, for normal x and y.
        noise = statistics.median(self._changes) / 0.954
        return gain > max(LEAST_SCORE, NOISES * noise) and mean < self._best - MOST_LOST * gain


class Alarms:
    """Alarms of one run. Each alarm is raised at most once."""

    def __init__(self, options: Collection[str], silent: Collection[str] = ()) -> None:
        """
        Args:
            options: names of the options of the run. Advice that names other options is left out.
            silent: names of alarms that do not apply to this run.
        """
        self._options = options
        self._first: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._courses = {"eval/score": _EvaluationCourse(), "reward/score": _StepCourse()}
        self._is_lost: dict[str, float] = {}
        self._wrong: dict[str, int] = {}
        self._sounded = set(silent)

    def look(self, step: int, metrics: Mapping[str, Any]) -> list[AlarmEvent]:
        """Return the alarms that a step raises for the first time.

        Args:
            step: number of the step.
            metrics: the logged metrics, under the names of any system. Values that are not numbers are ignored.
        """
        now = self._recorded({**metrics, "step": step})
        events: list[AlarmEvent] = []
        for alarm in ALARMS:
            if self._is_wrong(alarm, now):
                text = alarm.text.format(now=now[alarm.watches], first=self._first[alarm.watches])
                events.append(self._event(alarm, step, text))
        if names := [name for name, x in metrics.items() if isinstance(x, float) and not math.isfinite(x)]:
            # One bad gradient makes most metrics of a step nan, and the message has to stay one line.
            if len(names) > 3:
                names = [*names[:2], f"{names[2]} and more"]
            events.append(self._event(NOT_A_NUMBER, step, NOT_A_NUMBER.text.format(names=", ".join(names))))
        # Once per run: an alarm that is repeated in every step would hide the others.
        fresh = [event for event in events if event.alarm not in self._sounded]
        self._sounded |= {event.alarm for event in fresh}
        return fresh

    def recall(self, run_dir: Path) -> None:
        """Restore the state of a resumed run: first and best values from its metrics.jsonl, and the alarms that it has
        raised from its events.jsonl.
        """
        for record in json_lines(run_dir / "metrics.jsonl"):
            self._recorded(record)
        # The prefix selects alarms: `event` is the first field of a line. A user's own event may also be named "alarm",
        # hence `get`.
        alarms = json_lines(run_dir / "events.jsonl", b'{"event": "alarm"')
        self._sounded |= {str(record.get("alarm")) for record in alarms}

    def _recorded(self, metrics: Mapping[str, Any]) -> Numbers:
        numbers = {name: x for name, x in metrics.items() if isinstance(x, int | float)}
        # If a metric is logged under two names, the value under this project's name is used: alarm texts refer to it.
        named = {canonical_name(name): x for name, x in numbers.items()} | numbers
        now = {name: x for name, x in named.items() if math.isfinite(x)}
        for name, x in now.items():
            self._first.setdefault(name, x)
        for name in _RISING:
            if name in now:
                self._best[name] = max(now[name], self._best.get(name, -math.inf))
                self._is_lost[f"lost:{name}"] = float(self._courses[name].has_lost(now[name]))
        return now | {f"best:{name}": x for name, x in self._best.items()} | self._is_lost

    def _is_wrong(self, alarm: Alarm, now: Numbers) -> bool:
        if alarm.watches not in now:
            return False
        # A step without the condition resets the count, so that two bad steps with others in between raise no alarm.
        count = 0
        if alarm.sounds(now, self._first):
            count = self._wrong.get(alarm.name, 0) + 1
        self._wrong[alarm.name] = count
        return count >= alarm.steps

    def _event(self, alarm: Alarm, step: int, text: str) -> AlarmEvent:
        return AlarmEvent(alarm.name, step, time.time(), f"{text} ({alarm.watches})", advice(alarm, self._options))


def advice(alarm: Alarm, options: Collection[str] | None = None) -> str:
    """Return the advice of an alarm, without advice on options that the run lacks.

    Args:
        alarm: the alarm.
        options: names of the options of the run. None keeps all advice.
    """
    known = [each for each in alarm.remedies if options is None or set(_NAME.findall(each)) <= set(options)]
    return "; ".join(_NAME.sub(r"\1", each) for each in known)

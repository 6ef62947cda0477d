"""The summary at the end of a run."""

from dataclasses import replace
from typing import Any

from core import CallEvent, JobEvent
from plugins.light_meter.observer import MEASURE, LimitsObserver
from training.tracking.event_types import StepEvent

ROLES = {"TRAINER": 1, "ACTOR": 1}


def run(observer: LimitsObserver, steps: int, metrics: dict[str, float]) -> None:
    for step in range(1, steps + 1):
        took = {"timing_s/generate": 4.0, "timing_s/train": 6.0, "timing_s/step": 10.0, "perf/tokens_per_second": 48.0}
        observer(StepEvent(step, steps, 100.0 + 10 * step, took | metrics))
        observer(CallEvent("job", "ACTOR", 0, "update", 110.0 + 10 * step, 0, seconds=6.0))


def test_summary_names_the_phases_their_bounds_and_one_option(config: Any) -> None:
    few = replace(config, rollout=replace(config.rollout, max_num_seqs=8))
    observer = LimitsObserver(few, ROLES)
    run(observer, 3, {"bound/generate_s": 1.0, "bound/train_s": 3.0})
    assert observer.summary() == [
        "train 6 s, allowed 3 s (50%)",
        "generate 4 s, allowed 1 s (25%), largest loss: 8 rows of 32 possible; try rollout.max_num_seqs=32",
        "idle: actor 10% of the time",
    ]


def test_without_bounds_the_summary_names_the_command_that_measures_the_machine(config: Any) -> None:
    observer = LimitsObserver(config, ROLES)
    run(observer, 3, {})
    assert observer.summary()[0] == MEASURE


def test_run_of_two_steps_has_no_summary(config: Any, capsys: Any) -> None:
    observer = LimitsObserver(config, ROLES)
    run(observer, 2, {"bound/generate_s": 1.0})
    observer(JobEvent("end", 1.0))
    assert capsys.readouterr().out == ""


def test_job_without_rollouts_has_no_observer() -> None:
    assert LimitsObserver.open("job", None, ROLES) is None

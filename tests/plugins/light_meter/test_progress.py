"""Bounds among the metrics of a step."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.batch import Batch
from components.registry import load
from plugins.light_meter.progress import BoundProgress, limits_of
from tests.plugins.machine_speed.test_speed import SPEED
from training.run.progress import Progress

BATCH = Batch.from_rows(
    {"tokens": [[3, 4, 5, 6]] * 4, "action_mask": [[False, False, True, True]] * 4},
    {"prompt_length": [2] * 4, "prompt_id": [0, 0, 1, 1]},
)
TOOK = {"timing_s/generate": 2.0, "timing_s/train": 3.0, "timing_s/step": 5.0}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path))


def run_of(config: Any) -> Any:
    """The two attributes of a run that the counters read."""
    return SimpleNamespace(config=config, checkpoints=SimpleNamespace(metrics={"timing_s/checkpoint": 1.0}))


def test_step_has_the_bounds_of_its_phases_once_the_machine_is_measured(config: Any) -> None:
    assert "bound/train_s" not in BoundProgress(run_of(config)).count(TOOK, BATCH)
    load("machine speed", "write")(SPEED)
    metrics = BoundProgress(run_of(config)).count(TOOK, BATCH)
    for phase, seconds in (("generate", 2.0), ("train", 3.0), ("checkpoint", 1.0)):
        bound = metrics[f"bound/{phase}_s"]
        assert bound > 0
        assert metrics[f"bound/{phase}_share"] == pytest.approx(bound / seconds)


def test_counters_are_those_of_a_run_without_bounds(config: Any) -> None:
    bound, plain = BoundProgress(run_of(config)), Progress()
    assert bound.count(TOOK, BATCH) == plain.count(TOOK, BATCH)
    assert bound.state_dict() == plain.state_dict()
    bound.load_state_dict({"version": 3, "tokens": 7, "seconds": 1.0})
    assert (bound.version, bound.tokens) == (3, 7)


def test_model_of_an_unknown_architecture_has_no_bounds(config: Any, tmp_path: Path) -> None:
    load("machine speed", "write")(SPEED)
    assert limits_of(config) is not None
    unknown = replace(config, model=replace(config.model, path=str(tmp_path)))
    assert limits_of(unknown) is None

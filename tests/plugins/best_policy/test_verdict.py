"""The warning of a run that ends with a lower score than its best step or its start."""

import re
from pathlib import Path

import torch

from components.batch import Batch
from components.generate.config import SamplingConfig
from plugins.best_policy.verdict import verdict
from tests.messages import says
from training.run.evaluation import Evaluation


def evaluation_of_one_prompt() -> Evaluation:
    return Evaluation(
        prompts=Batch([1], {"tokens": torch.tensor([3])}),
        response=lambda prompts, _: prompts,
        sampling=SamplingConfig(temperature=0.5),
        samples_per_prompt=2,
        best_metric_key="",
        info=lambda _: None,
    )


def ended(scores: list[float], steps: list[int]) -> Evaluation:
    """Return the evaluation of a run with these scores, the first at its start and the last after its end."""
    evaluation = evaluation_of_one_prompt()
    for step, score in zip(steps, scores, strict=True):
        metrics = {"eval/score": score}
        evaluation.scores["end" if step else "start"] = metrics
        evaluation.is_best(metrics, step)
    return evaluation


def test_the_end_names_the_best_policy_and_its_checkpoint_if_one_exists(tmp_path: Path) -> None:
    evaluation = ended([0.476, 0.54, 0.148], [0, 2, 4])
    said = verdict(evaluation, tmp_path)
    assert re.search(says("step 2", "0.540", "no checkpoint", "0.148", "worse than the start", "0.476"), said)
    assert "train.learning_rate" in said
    (tmp_path / "step_2").mkdir()
    assert f"{tmp_path}/step_2/hf" in verdict(evaluation, tmp_path)


def test_the_verdict_omits_a_worse_start_and_is_empty_if_the_last_step_is_best(tmp_path: Path) -> None:
    (tmp_path / "step_2").mkdir()
    said = verdict(ended([0.2, 0.54, 0.4], [0, 2, 4]), tmp_path)
    assert re.search(says("step 2", "0.540", f"{tmp_path}/step_2/hf"), said)
    assert "start" not in said
    assert verdict(ended([0.2, 0.54], [0, 2]), tmp_path) == ""
    assert verdict(ended([0.2], [0]), tmp_path) == ""


def test_the_initial_model_is_not_reported_as_the_best_step(tmp_path: Path) -> None:
    said = verdict(ended([0.5, 0.4], [0, 2]), tmp_path)
    assert re.search(says("worse than the start", "0.400", "0.500"), said)
    assert "step" not in said

"""recipes/distill: advantages by hand, refused options, a run that learns from its teacher, and one that cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from local_runs import run_locally

from components.batch import Batch
from recipes.distill.algorithm import add_advantages, agreement, from_columns, to_columns
from recipes.distill.config import AlgorithmOptions, DistillConfig
from recipes.distill.main import read_config
from tests.messages import says
from training.options.schema import ConfigError

MODELS = ["model.path=warm_start:sort", "teacher.path=expert:sort", "data.path=task:sort"]


def config(**algorithm: Any) -> DistillConfig:
    options = read_config([*MODELS, "prompts_per_step=1", "samples_per_prompt=2"])
    options.algorithm = AlgorithmOptions(**algorithm)
    return options


def responses() -> Batch:
    """One prompt with two responses of two tokens. The teacher likes the first response more than the student does."""
    return Batch(
        [3, 3],
        {
            "tokens": torch.arange(6),
            "action_mask": torch.tensor([False, True, True] * 2),
            "logprob": torch.tensor([0, -1.0, -2.0, 0, -1.0, -2.0]),
            "teacher_logprob": torch.tensor([0, -0.5, -1.0, 0, -3.0, -2.0]),
        },
        {"reward": torch.tensor([1.0, 0.0]), "prompt_id": torch.tensor([0, 0])},
    )


def test_the_advantage_is_the_teachers_log_probability_minus_the_students() -> None:
    experience = add_advantages(responses(), config())
    assert experience["advantage"].tolist() == [0, 0.5, 1.0, 0, -2.0, 0]
    # Half of the difference of the rewards to their mean of .5 is added to each token.
    mixed = add_advantages(responses(), config(reward_coef=0.5))["advantage"]
    assert mixed[mixed != 0].tolist()[1:3] == [0.75, 1.25]


def test_the_kl_of_a_position_is_its_baseline() -> None:
    top_NK = torch.tensor([[0.5, 0.3]] * 6).log()
    columns = to_columns(top_NK, "teacher_top") | to_columns(torch.tensor([[0.2, 0.3]] * 6).log(), "student_top")
    samples = responses().with_tokens(**columns)
    advantage_N = add_advantages(samples, config(top_k=2))["advantage"]
    # KL of (.2, .3, .5) to (.5, .3, .2).
    baseline = 0.2 * torch.tensor(0.2 / 0.5).log() + 0.5 * torch.tensor(0.5 / 0.2).log()
    torch.testing.assert_close(advantage_N[1], 0.5 + baseline)
    assert from_columns(samples, "teacher_top", 2).equal(top_NK)
    metrics = agreement(samples, config(top_k=2))
    assert metrics["distill/reverse_kl"] == pytest.approx((-0.5 - 1 + 2 + 0) / 4)
    assert metrics["distill/top_mass"] == pytest.approx(0.8)
    assert metrics["distill/far_share"] == 0


@pytest.mark.parametrize(
    ("option", "facts"),
    [
        ("algorithm.loss=k1", ["does not contain the teacher", "policy_gradient"]),
        ("algorithm.loss=divergence", ["algorithm.top_k"]),
        ("algorithm.top_k=-1", ["algorithm.top_k=-1"]),
        ("algorithm.kl_coef=0.1", ["takes the place of a reference model"]),
        ("algorithm.reward_coef=1 samples_per_prompt=1", ["samples_per_prompt=1"]),
        ("algorithm.divergence=jsd algorithm.jsd_beta=1", ["jsd_beta"]),
        ("teacher.path=expert:guess", ["guess", "no single correct response"]),
        ("teacher.path=", ["teacher.path is empty"]),
    ],
)
def test_options_without_a_meaning_are_refused(option: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        read_config([*MODELS, *option.split()])


@pytest.mark.full
@pytest.mark.parametrize("loss", ["policy_gradient", "divergence"])
def test_a_few_steps_move_the_student_towards_the_teacher(loss: str, tmp_path: Path) -> None:
    options = [*MODELS, f"algorithm.loss={loss}", "algorithm.top_k=19", "prompts_per_step=32", "samples_per_prompt=4"]
    options += ["data.max_samples=128", "rollout.max_new_tokens=8", "train.learning_rate=3e-4"]
    options += ["train.mini_batch_size=32"]
    run = run_locally("distill", tmp_path, {"plain": options})["plain"]
    kls = [line["distill/reverse_kl"] for line in run.metrics]
    assert len(kls) == 4
    assert kls[3] < 0.3 * kls[0]
    assert all(0.9 < line["distill/top_mass"] <= 1.0001 for line in run.metrics)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [5, 6])
def test_the_student_comes_within_a_twentieth_of_its_teacher(seed: int, tmp_path: Path) -> None:
    plain = ["--config", "recipes/distill/tiny.yaml", f"seed={seed}"]
    arguments = {
        "taught": [*plain],
        "teacher": [
            *plain,
            "model.path=expert:sort",
            "train.learning_rate=0",
            "max_steps=1",
        ],
        "still": [*plain, "train.learning_rate=0", "max_steps=2"],
    }
    runs = run_locally("distill", tmp_path, arguments)
    score = {name: run.summary["score"] for name, run in runs.items()}
    assert score["taught"]["start"] < 0.3
    assert score["taught"]["end"] > score["teacher"]["end"] - 0.05
    assert score["still"]["end"] == pytest.approx(score["still"]["start"], abs=0.02)

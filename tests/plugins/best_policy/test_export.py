"""The best step, and refused options."""

from typing import Any

import pytest

from plugins.best_policy.export import is_best
from recipes.dpo.main import read_config as read_dpo
from recipes.grpo.main import read_config as read_grpo
from tests.messages import says


def test_the_best_step_has_the_highest_accuracy_or_else_the_lowest_loss() -> None:
    evaluations: dict[str, Any] = {"start": {"loss": 2.0}}
    losses = [1.5, 1.6, 1.5, 1.4]
    chosen = [is_best(evaluations, {"eval/loss": loss}, step) for step, loss in enumerate(losses, 1)]
    assert chosen == [True, False, False, True]
    assert evaluations["best"] == {"loss": 1.4, "step": 4}
    evaluations = {"start": {"loss": 2.0, "accuracy": 0.5}}
    accuracies = [(1.0, 0.4), (3.0, 0.6)]
    chosen = [is_best(evaluations, {"eval/loss": x, "eval/accuracy": y}, 1) for x, y in accuracies]
    assert chosen == [False, True]
    assert not is_best(evaluations, {"actor/loss": 0.0}, 3)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ("evaluation.every=1", ["checkpoint.export_path"]),
        ("checkpoint.export_path=x", ["evaluation.every"]),
        ("checkpoint.export_path=x evaluation.every=1 evaluation.held_out=0", ["held-out data", "evaluation.path"]),
    ],
)
def test_an_export_that_cannot_be_decided_is_refused(options: str, facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says("checkpoint.export=best", *facts)):
        read_dpo(["model.path=m", "data.path=d", "checkpoint.export=best", *options.split()])


def test_an_rl_recipe_refuses_it_without_held_out_prompts() -> None:
    words = "model.path=m data.path=d reward.source=exact checkpoint.export=best checkpoint.export_path=x"
    with pytest.raises(ValueError, match=says("checkpoint.export=best", "evaluation.path")) as raised:
        read_grpo(list[str](words.split()))
    # An option of supervised recipes only.
    assert "evaluation.held_out" not in str(raised.value)

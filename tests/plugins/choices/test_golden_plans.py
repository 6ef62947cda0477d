"""The options that the plan chooses for published models on common GPUs, against a table and against each other."""

import itertools
import runpy
from typing import Any

import pytest

from tests.architecture import ROOT

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/golden_plans.py"))


@pytest.fixture(scope="module")
def plans(script: dict[str, Any]) -> dict[Any, Any]:
    return script["plans"]()


def is_fitting(plan: Any) -> bool:
    return not any("nothing faster fits" in text for text in plan.chosen)


def rank(plan: Any) -> tuple[Any, ...]:
    """Return the preference of the choice: the options in the order in which the choice decides about them."""
    train = plan.config.train
    rows = plan.config.rollout.max_num_seqs
    stays_awake = not plan.config.placement.engines_sleep
    return is_fitting(plan), stays_awake, not train.gradient_checkpointing, -train.zero_stage, train.max_tokens, rows


def test_the_choices_equal_those_of_the_golden_table(script: dict[str, Any], plans: dict[Any, Any]) -> None:
    """After an intended change run `python scripts/golden_plans.py` and review the diff of the table."""
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](plans)


def test_every_choice_fits_in_gpu_memory(script: dict[str, Any], plans: dict[Any, Any]) -> None:
    fitting = [plan for plan in plans.values() if is_fitting(plan)]
    assert len(fitting) > len(plans) / 2
    for plan in fitting:
        for place in script["gpu_places"](plan):
            assert place["most"] <= 0.94 * place["there"]
            assert place["verdict"] == "fits"
        plan.memory.check()
        engine = next(role for role in plan.memory.fields()["memory"] if role["role"] == "ROLLOUT")
        assert engine["cache"] > 0


def test_a_larger_gpu_never_gets_a_less_preferred_choice(plans: dict[Any, Any]) -> None:
    for (small, small_plan), (large, large_plan) in itertools.pairwise(plans.items()):
        if small.card < large.card:
            assert rank(small_plan) <= rank(large_plan), (small, large)


def test_more_gpus_never_get_a_less_preferred_way_to_train(script: dict[str, Any], plans: dict[Any, Any]) -> None:
    case_type = script["Case"]
    for case, plan in plans.items():
        if case.gpus == 1:
            on_eight = plans[case_type(case.model, 8, case.lengths, case.card)]
            assert rank(plan)[:2] <= rank(on_eight)[:2]


def test_small_models_on_a_large_gpu_run_as_fast_as_possible(plans: dict[Any, Any]) -> None:
    """Checks the example of the published targets: 256 prompts x 8 responses of 200 tokens on one GPU of 80 GB."""
    configs = {
        case.model: plan.config
        for case, plan in plans.items()
        if (case.gpus, case.card) == (1, 80) and case.lengths == (100, 200)
    }
    for model in ("Qwen2.5-0.5B", "Qwen2.5-1.5B"):
        config = configs[model]
        assert not config.train.gradient_checkpointing
        assert not config.placement.engines_sleep
        assert config.train.zero_stage == 2
        assert config.rollout.gpu_memory < 0.45
    assert configs["Qwen2.5-0.5B"].rollout.max_num_seqs == 2048

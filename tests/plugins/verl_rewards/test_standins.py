"""A reward file that imports verl's reward functions works where verl is not installed."""

from pathlib import Path

import pytest

from components.rewards.base import RewardSettings
from components.rewards.score_functions import ScoreCode
from components.rewards.workers import WorkerReward
from plugins.verl_rewards import standins
from recipes.verl_ppo.reward import reward_code

FILE = """
from verl.utils.reward_score import default_compute_score, gsm8k
from verl.utils.reward_score.math_dapo import compute_score as dapo
from verl.utils.reward_score.math import last_boxed_only_string, remove_boxed


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    boxed = remove_boxed(last_boxed_only_string(solution_str))
    return {
        "score": gsm8k.compute_score(solution_str, ground_truth),
        "dapo": dapo(solution_str, ground_truth)["score"],
        "source": default_compute_score(data_source, solution_str, ground_truth, extra_info),
        "digits": len(boxed),
    }
"""


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 1,200", 1.0, 1.0),
        ("1,200 in all", 0.0, 1.0),
        ("#### 5", 0.1, 0.1),
        ("nothing", 0.0, 0.0),
    ],
)
def test_gsm8k_has_the_scores_of_verl(text: str, strict: float, flexible: float) -> None:
    assert standins.gsm8k_score(text, "1200", format_score=0.1) == strict
    assert standins.gsm8k_score(text, "1200", method="flexible", format_score=0.1) == flexible


def test_the_last_box_is_found_with_its_braces() -> None:
    box = standins.last_boxed_only_string(r"\boxed{1} then \boxed{\frac{1}{2}} end")
    assert box == r"\boxed{\frac{1}{2}}"
    assert standins.remove_boxed(box) == r"\frac{1}{2}"
    assert standins.last_boxed_only_string("no } box {") is None
    assert standins.last_boxed_only_string(r"\boxed{open") is None


def test_an_unknown_data_source_raises_the_error_of_verl() -> None:
    with pytest.raises(NotImplementedError, match="data_source='x'"):
        standins.default_compute_score("x", "", "")


def test_a_reward_file_imports_the_functions_in_the_reward_processes(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(FILE)
    code = ScoreCode(path=str(tmp_path / "score.py"))
    response = r"It is \boxed{72}. #### 72"
    rows = [{"data_source": "openai/gsm8k", "columns": {"extra_info": None}}]
    with WorkerReward(reward_code(code), RewardSettings()) as reward:
        output = reward(["q" + response], ["q"], ["72"], responses=[response], rows=rows)
    assert output.reward_B.tolist() == [1.0]
    assert {name: values.tolist() for name, values in output.logs.items()} == {
        "dapo": [1.0],
        "source": [1.0],
        "digits": [2.0],
    }

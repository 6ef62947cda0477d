"""Names of metrics from reward code: unique, named after the function, and different from the run's own metrics."""

from pathlib import Path

import pytest
import torch

from components.batch import Batch
from components.data.samples import with_rewards
from components.rewards.base import RewardOutput
from components.rewards.names import RUN_NAMES, metric_names
from components.rewards.opening import open_reward
from components.rewards.part_names import part_names
from training.run.evaluation_metrics import heldout_metrics
from training.run.rollouts import rollout_metrics

OF_THE_RUN = ["score", "reward", "failed", "group_std", "shaped", "zero_variance_share"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write reward files into the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    result = "(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    for name, functions in {
        "a": ["accuracy", "format_reward", "score", "accuracy_score"],
        "b": ["accuracy"],
        "style": ["reward_func"],
        "more/a": ["accuracy"],
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("".join(f"def {function}{result}" for function in functions))
    return tmp_path


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["a.py:accuracy", "a.py:format_reward"], ["accuracy", "format_reward"]),
        (["b.py", "style.py", "gsm8k"], ["accuracy", "style", "gsm8k"]),
        (["a.py:accuracy", "b.py:accuracy"], ["a_accuracy", "b_accuracy"]),
        (["a.py:accuracy", "b.py:accuracy", "more/a.py"], ["a_accuracy", "b_accuracy", "a_accuracy_2"]),
        (["b.py", "b.py", "b.py"], ["b_accuracy", "b_accuracy_2", "b_accuracy_3"]),
        (["a.py:score", "a.py:accuracy"], ["a_score", "accuracy"]),
        (["http://h:5000/score", "http://h:6000/score"], ["h_score", "h_score_2"]),
    ],
)
def test_a_part_of_a_sum_has_the_name_of_its_function(specs: list[str], names: list[str], folder: Path) -> None:
    assert part_names(specs) == names


def test_a_sum_logs_each_part_by_its_name(folder: Path) -> None:
    with open_reward("1*a.py:accuracy + 0.2*a.py:format_reward + 1*a.py:accuracy_score") as reward:
        output = reward(["q"], ["q"], [""])
    parts = ("accuracy", "format_reward", "accuracy_score")
    assert set(output.logs) == {name for part in parts for name in (part, f"{part}/score")}
    assert output.reward_B.tolist() == pytest.approx([2.2])
    assert output.score_B.tolist() == [1.0]


def test_a_part_without_a_reward_for_a_response_is_not_in_its_mean(folder: Path) -> None:
    (folder / "half.py").write_text(
        "def half(completions, **kwargs):\n    return [1.0 if c == 'a' else None for c in completions]\n"
    )
    with open_reward("1*half.py + 1*b.py") as reward:
        output = reward(["a", "b"], ["", ""], ["", ""])
    assert output.logs["half"].isnan().tolist() == [False, True]
    assert output.logs["half/score"].nanmean() == 1.0


def responses(logs: dict[str, float]) -> Batch:
    """Return four responses to two prompts whose reward logs these numbers."""
    per_sequence = {
        "prompt_id": torch.tensor([0, 0, 1, 1]),
        "truncated": torch.zeros(4, dtype=torch.bool),
    }
    batch = Batch.from_rows({"tokens": [[1]] * 4, "action_mask": [[True]] * 4}, per_sequence=per_sequence)
    reward_B = torch.tensor([0.0, 1.0, 2.0, 3.0])
    output = RewardOutput(reward_B, reward_B / 4, {name: torch.full((4,), value) for name, value in logs.items()})
    return with_rewards(batch, output, print).with_sequences(shaped_reward=reward_B)


def test_a_reward_log_does_not_overwrite_a_metric_of_the_run() -> None:
    plain = rollout_metrics(responses({}))
    assert {name.removeprefix("reward/") for name in plain if name.startswith("reward/")} <= set(OF_THE_RUN)
    actual = rollout_metrics(responses(dict.fromkeys([*OF_THE_RUN, "mine", "log_score"], 99.0)))
    assert {name: actual[name] for name in plain} == plain
    assert {name for name in actual if name not in plain} == {
        *(f"reward/log_{name}" for name in OF_THE_RUN),
        "reward/log_log_score",
        "reward/mine",
    }


def test_a_reward_log_does_not_overwrite_a_metric_of_the_evaluation() -> None:
    def measured(logs: dict[str, float]) -> dict[str, float]:
        batch = responses(logs)
        logged = {name.removeprefix("log_"): batch[name] for name in batch.names if name.startswith("log_")}
        columns = (batch["score"], batch["prompt_id"], ["s"] * 4, batch.lengths, batch["truncated"])
        return heldout_metrics(*columns, logged)

    plain = measured({})
    names = [name.removeprefix("s_") for name in plain if name.startswith("s_")]
    assert all(RUN_NAMES.fullmatch(name) for name in names)
    actual = measured(dict.fromkeys(names, 99.0))
    assert {name: actual[name] for name in plain} == plain
    assert {f"s_log_{name}" for name in names} <= actual.keys()


def test_a_renamed_reward_log_gives_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert metric_names(["shaped", "x"]) == {"shaped": "log_shaped", "x": "x"}
    assert len([record for record in caplog.records if "log_shaped" in record.getMessage()]) <= 1

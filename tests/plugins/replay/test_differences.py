"""The first difference of two runs is found in the order in which a step computes its quantities."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from components.batch import Batch
from plugins.replay.compare import main
from plugins.replay.differences import differences, metrics_of
from training.tracking.tracker import ROLLOUTS


def batch(**changed: Any) -> Batch:
    """Two responses to one prompt each, of 4 and 3 tokens."""
    per_token = {
        "tokens": torch.tensor([5, 6, 7, 8, 5, 9, 8]),
        "action_mask": torch.tensor([False, False, True, True, False, False, True]),
        "rollout_logprob": torch.tensor([0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -0.5]),
        "logprob": torch.tensor([0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -0.5]),
        "advantage": torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0, -1.0]),
    }
    per_sequence = {
        "prompt_id": torch.tensor([3, 4]),
        "sample_id": torch.tensor([0, 0]),
        "prompt_length": torch.tensor([2, 2]),
        "reward": torch.tensor([1.0, 0.0]),
        "score": torch.tensor([1.0, 0.0]),
        "log_parts": torch.tensor([math.nan, 0.0]),
    }
    for name, value in changed.items():
        (per_token if name in per_token else per_sequence)[name] = value
    return Batch([4, 3], per_token, per_sequence)


def write_run(folder: Path, samples: Batch | None, loss: float = 0.5, digest: str = "aa", seed: int = 1) -> Path:
    """Write the records of a run of one step."""
    (folder / "rollouts").mkdir(parents=True)
    if samples is not None:
        samples.save(folder / ROLLOUTS.format(step=1))
    line = {
        "step": 1,
        "time": 0.0,
        "actor/loss": loss,
        "timing_s/step": loss,
        "nonfinite": ["actor/odd"],
        "actor/odd": None,
    }
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "digests.jsonl").write_text(json.dumps({"step": 1, "role": "actor", "digest": digest}) + "\n")
    (folder / "config.yaml").write_text(f"seed: {seed}\ntrain:\n  learning_rate: 0.1\n")
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.2", "packages": {"torch": f"2.{seed}"}}))
    return folder


def quantities(tmp_path: Path, other: Batch | None, **fields: Any) -> list[tuple[str, str]]:
    """Return the (quantity, name) of all differences between the default run and another one."""
    first = write_run(tmp_path / "first", batch())
    second = write_run(tmp_path / "second", other, **fields)
    return [(difference.quantity, difference.name) for difference in differences(first, second, 1)]


def test_equal_runs_with_different_times_have_no_difference(tmp_path: Path) -> None:
    assert quantities(tmp_path, batch()) == []


def test_a_changed_reward_comes_before_the_advantage_and_the_loss(tmp_path: Path) -> None:
    other = batch(reward=torch.tensor([1.0, 1.0]), advantage=torch.zeros(7))
    expected = [("rewards", "reward"), ("advantages", "advantage"), ("metrics", "actor/loss"), ("weights", "actor")]
    assert quantities(tmp_path, other, loss=0.25, digest="bb") == expected


def test_a_changed_prompt_is_distinguished_from_a_changed_response(tmp_path: Path) -> None:
    prompt = batch(tokens=torch.tensor([5, 6, 7, 8, 4, 9, 8]))
    assert quantities(tmp_path, prompt) == [("prompt tokens", "tokens"), ("responses", "tokens")]


def test_responses_of_different_lengths_are_reported_by_length(tmp_path: Path) -> None:
    other = batch()
    shorter = Batch(
        [3, 3], {name: column[[0, 1, 2, 4, 5, 6]] for name, column in other.per_token.items()}, other.per_sequence
    )
    first = write_run(tmp_path / "first", other)
    second = write_run(tmp_path / "second", shorter)
    all_differences = list(differences(first, second, 1))
    assert [difference.name for difference in all_differences] == ["tokens"]
    assert all_differences[0].detail == "of response 0 have the lengths 4 and 3"


def test_a_difference_names_response_token_values_and_the_largest_gap(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", batch())
    logprob = torch.tensor([0.0, 0.0, -1.0, -2.5, 0.0, 0.0, -0.25])
    second = write_run(tmp_path / "second", batch(logprob=logprob))
    [difference] = differences(first, second, 1)
    place = "of response 0, token 3 is -2.0 and -2.5; 2 of 7 entries differ, by at most 0.5"
    assert str(difference) == f"step 1: log-probabilities differ: logprob {place}"


def test_the_last_line_of_a_repeated_step_is_used(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "time": 1.0, "actor/loss": 2.0}) + "\n")
    assert metrics_of(run, 1) == {"actor/loss": 2.0}


def test_compare_prints_options_environment_and_the_first_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_run(tmp_path / "first", batch())
    second = write_run(tmp_path / "second", batch(reward=torch.tensor([1.0, 0.5])), seed=2)
    assert main([str(first), str(second)]) == 1
    out = capsys.readouterr().out
    assert "seed: 1 -> 2" in out
    assert "packages.torch: 2.1 -> 2.2" in out
    assert "compare: 0 common steps before step 1 are equal" in out
    assert "step 1: rewards differ: reward of response 1 is 0.0 and 0.5" in out
    assert "response 1 belongs to prompt 4 of the data" in out


def test_compare_reports_equal_runs_and_refuses_a_folder_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_run(tmp_path / "first", batch())
    second = write_run(tmp_path / "second", batch())
    assert main([str(first), str(second)]) == 0
    assert "all 1 common steps are equal, 1 to 1" in capsys.readouterr().out
    assert main([str(first), str(tmp_path)]) == 2
    assert f"{tmp_path} is not the folder of a run" in capsys.readouterr().err

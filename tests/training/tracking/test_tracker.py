"""Files that a run writes. A failure to write one does not stop the run."""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import yaml

from components.batch import Batch
from tests.messages import says
from training.tracking import (
    Tracker,
    console_line,
    finish_summary,
    redact,
)

PROJECT = Path(__file__).parents[3]


def records(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def read_summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.fixture
def tracker(tmp_path: Path) -> Tracker:
    return Tracker(tmp_path / "run", "toy", {"lr": 1e-3}, seed=3)


def test_each_step_is_one_json_line_of_plain_numbers(tracker: Tracker) -> None:
    tracker.log(1, {"reward": torch.tensor(0.5), "tokens": np.int64(7), "note": "x"})
    # The line is written at once, before the tracker is closed.
    (record,) = records(tracker.run_dir)
    assert record.pop("time") > 1.7e9
    assert record == {"reward": 0.5, "tokens": 7, "note": "x", "step": 1}


def test_non_finite_numbers_become_null_and_are_named(tracker: Tracker) -> None:
    tracker.log(1, {"loss": math.nan, "ratio": math.inf, "kl": 0.0})
    (record,) = records(tracker.run_dir)
    assert (record["loss"], record["ratio"], record["kl"]) == (None, None, 0.0)
    assert record["nonfinite"] == ["loss", "ratio"]


def test_numbers_in_mappings_lists_and_tensors_are_strict_json(tracker: Tracker) -> None:
    tracker.log(
        1,
        {
            "heads": {"a": torch.tensor(math.nan), "b": {"c": [1.0, -math.inf]}},
            "per_layer": torch.tensor([1.0, math.inf]),
            "norm": torch.tensor(math.inf, dtype=torch.bfloat16, requires_grad=True),
            "share": np.float32("nan"),
            "count": np.array([1, 2]),
            "fine": {"x": (1, 2)},
        },
    )
    (record,) = records(tracker.run_dir)
    assert record["heads"] == {"a": None, "b": {"c": [1.0, None]}}
    assert record["per_layer"] == [1.0, None]
    assert (record["norm"], record["share"], record["count"]) == (None, None, [1, 2])
    assert record["fine"] == {"x": [1, 2]}
    assert record["nonfinite"] == ["heads", "per_layer", "norm", "share"]


def test_a_metric_that_cannot_be_read_does_not_stop_the_run(tracker: Tracker, caplog: pytest.LogCaptureFixture) -> None:
    meta = torch.empty(2, device="meta")  # it contains no numbers
    for step in (1, 2):
        tracker.log(step, {"loss": meta})
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(says("metrics", tracker.run_dir), warning)


def test_metrics_of_repeated_steps_are_removed_on_resume(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "toy", {}, seed=0)
    for step in (1, 2, 3):
        tracker.log(step, {"try": 1})
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("no record\n[1]\n")
        file.write('{"step": 4, "tr')  # killed in the middle of a line
    resumed = Tracker(tmp_path, "toy", {}, seed=0, resume_step=2)
    resumed.log(3, {"try": 2})
    assert [(record["step"], record["try"]) for record in records(tmp_path)] == [(1, 1), (2, 1), (3, 2)]


def test_a_failing_sink_is_disabled_with_one_warning(tracker: Tracker, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        run_id = None
        calls = 0

        def log(self, step: int, metrics: Mapping[str, Any]) -> None:
            self.calls += 1
            raise ConnectionError("gone")

        def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
            raise AssertionError("it is off")

        def close(self) -> None:
            raise AssertionError("it is off")

    broken = Broken()
    tracker._sinks["elsewhere"] = broken
    for step in (1, 2, 3):
        tracker.log(step, {"reward": 1.0})
    tracker.close()
    assert broken.calls == 1
    assert [record["step"] for record in records(tracker.run_dir)] == [1, 2, 3]
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(says("elsewhere", tracker.run_dir, "ConnectionError: gone"), warning)


def test_an_unwritable_run_folder_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Folders at the paths of files: writing fails even for root.
    for name in ("metrics.jsonl", "summary.json", "config.yaml"):
        (tmp_path / name).mkdir()
    tracker = Tracker(tmp_path, "toy", {}, seed=0)
    tracker.log(1, {"reward": 1.0})
    tracker.update_summary(steps=1)
    tracker.close()
    finish_summary(tmp_path, "failed")
    assert re.search(says("metrics.jsonl", tmp_path), caplog.text)


def test_rollouts_are_a_parquet_file_with_a_row_per_sequence(tracker: Tracker) -> None:
    batch = Batch([2, 1], {"tokens": torch.tensor([5, 6, 7])}, {"reward": torch.tensor([1.0, 0.0])})
    tracker.rollouts(12, batch)
    path = tracker.run_dir / "rollouts" / "step_000012.parquet"
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [row["tokens"] for row in rows] == [[5, 6], [7]]
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert list(path.parent.iterdir()) == [path]


def test_a_new_run_in_an_old_folder_removes_all_metrics_including_step_0(tmp_path: Path) -> None:
    before = Tracker(tmp_path, "ppo", {}, 1)
    before.log(0, {"loss": 3.0})
    before.log(1, {"loss": 2.0})
    before.close()
    Tracker(tmp_path, "ppo", {}, 1, resume_step=0).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_rollouts_of_repeated_steps_are_removed_on_resume(tmp_path: Path) -> None:
    def steps() -> list[str]:
        return sorted(path.name for path in (tmp_path / "rollouts").iterdir())

    batch = Batch([1], {"tokens": torch.tensor([5])})
    tracker = Tracker(tmp_path, "toy", {}, seed=0)
    for step in (1, 2, 10):
        tracker.rollouts(step, batch)
    (tmp_path / "rollouts" / ".step_000011.parquet.partial").write_text("killed")
    (tmp_path / "rollouts" / "notes.txt").write_text("mine")
    Tracker(tmp_path, "toy", {}, seed=0, resume_step=2)
    assert steps() == ["notes.txt", "step_000001.parquet", "step_000002.parquet"]
    Tracker(tmp_path, "toy", {}, seed=0)
    assert steps() == ["notes.txt"]


def test_the_summary_is_updated_during_the_run_and_completed_by_the_driver(tracker: Tracker) -> None:
    tracker.update_summary(steps=2, seconds={"setup": 1.5}, score={"start": 0.2, "examples": 64})
    tracker.update_summary(seconds={"training": 9.0}, score={"end": 0.8}, tokens_per_second=math.nan)
    assert read_summary(tracker.run_dir) == {
        "recipe": "toy",
        "status": "running",
        "steps": 2,
        "seed": 3,
        "attempts": None,
        "resumed_from": None,
        "score": {"start": 0.2, "examples": 64, "end": 0.8},
        "seconds": {"setup": 1.5, "warm_start": None, "to_first_step": None, "training": 9.0},
        "peak_memory_bytes": None,
        "tokens_per_second": None,
        "error": None,
    }
    finish_summary(tracker.run_dir, "failed", error="it broke; the key was hf_" + "a" * 20, peak_memory_bytes=10)
    summary = read_summary(tracker.run_dir)
    assert (summary["status"], summary["steps"], summary["peak_memory_bytes"]) == ("failed", 2, 10)
    assert summary["error"] == "it broke; the key was ***"


def test_a_run_that_failed_before_its_trainer_still_has_a_summary(tmp_path: Path) -> None:
    finish_summary(tmp_path / "run", "failed", error="no room", recipe="toy", seed=1)
    summary = read_summary(tmp_path / "run")
    assert (summary["recipe"], summary["seed"], summary["steps"], summary["error"]) == ("toy", 1, 0, "no room")


def test_a_resumed_run_keeps_its_summary_and_a_new_one_in_the_same_folder_does_not(tmp_path: Path) -> None:
    Tracker(tmp_path, "toy", {}, seed=0).update_summary(score={"start": 0.2})
    finish_summary(tmp_path, "stopped")
    Tracker(tmp_path, "toy", {}, seed=0, resume_step=3)
    resumed = read_summary(tmp_path)
    assert (resumed["status"], resumed["score"]) == ("running", {"start": 0.2})
    finish_summary(tmp_path, "finished")
    Tracker(tmp_path, "toy", {}, seed=0)
    anew = read_summary(tmp_path)
    assert anew["score"] is None


def test_a_resumed_summary_keeps_unset_fields_and_has_the_resumed_step(tmp_path: Path) -> None:
    Tracker(tmp_path, "toy", {}, seed=0).update_summary(seconds={"setup": 2.0, "training": 5.0}, attempts=1)
    resumed = Tracker(tmp_path, "toy", {}, seed=0, resume_step=7)
    resumed.update_summary(seconds={"training": 9.0}, attempts=2)
    summary = read_summary(tmp_path)
    assert summary["seconds"] == {"setup": 2.0, "warm_start": None, "to_first_step": None, "training": 9.0}
    assert (summary["attempts"], summary["resumed_from"]) == (2, 7)


def test_an_incomplete_or_older_summary_can_be_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "summary.json").write_text('{"recipe": "to')
    finish_summary(tmp_path, "failed", recipe="toy", tokens_per_second=torch.tensor(math.inf))
    assert re.search(says("summary.json", tmp_path), caplog.text)
    summary = read_summary(tmp_path)
    assert (summary["recipe"], summary["status"], summary["tokens_per_second"]) == ("toy", "failed", None)
    (tmp_path / "summary.json").write_text('{"recipe": "old", "status": "stopped", "seconds": {"setup": 1.0}}')
    finish_summary(tmp_path, "finished", attempts=2)
    summary = read_summary(tmp_path)
    assert (summary["recipe"], summary["attempts"], summary["seconds"]) == ("old", 2, {"setup": 1.0})


def test_unknown_summary_fields_are_refused(tracker: Tracker) -> None:
    with pytest.raises(ValueError, match=says("acore", "recipe, status,")):
        tracker.update_summary(acore={})


def test_numbers_of_a_console_line_have_four_digits() -> None:
    metrics = {"reward": 0.123456, "tokens": 12345, "lr": 1e-6, "kl": torch.tensor(2.0), "loss": math.nan}
    assert console_line(7, metrics) == "step=7 reward=0.1235 tokens=12345 lr=1e-06 kl=2 loss=nan"


@dataclass
class Logger:
    key: str = "abc"
    project: str = "p"


@dataclass
class Config:
    use_wandb: str = "0123456789"
    wandb: Logger = field(default_factory=Logger)
    input_key: str = "question"
    max_tokens: int = 5
    eos_token: str = "</s>"
    path: Path = Path("a/b")
    betas: tuple[float, float] = (0.9, 0.95)


def test_only_values_of_keys_and_tokens_are_hidden() -> None:
    assert redact(Config()) == {
        "use_wandb": "***",
        "wandb": {"key": "***", "project": "p"},
        "input_key": "question",
        "max_tokens": 5,
        "eos_token": "</s>",
        "path": "a/b",
        "betas": [0.9, 0.95],
    }
    assert redact({"use_wandb": "True", "logger.wandb.key": "k", "api_key": None, "keys": "x"}) == {
        "use_wandb": "True",
        "logger.wandb.key": "***",
        "api_key": None,
        "keys": "x",
    }
    env = {
        "HF_TOKEN": "t",
        "WANDB_API_KEY": "k",
        "OPENAI_API_KEY": "k",
        "AWS_SECRET_ACCESS_KEY": "k",
        "DB_PASSWORD": "p",
    }
    assert set(redact(env).values()) == {"***"}


def test_keys_and_tokens_are_hidden_in_command_lines_and_texts() -> None:
    command = [
        "main.py",
        "--use_wandb",
        "0123",
        "--logger.wandb.key=k",
        "wandb.key=k",
        "--input_key",
        "q",
        "--seed",
        "1",
    ]
    assert redact(command) == [
        "main.py",
        "--use_wandb",
        "***",
        "--logger.wandb.key=***",
        "wandb.key=***",
        "--input_key",
        "q",
        "--seed",
        "1",
    ]
    assert redact("https://me:secret@host/rm") == "https://***@host/rm"
    assert redact({"note": f"mail sk-{'a' * 20} to x"}) == {"note": "mail *** to x"}


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("pip install git+https://ghx_token@host/repo.git", "pip install git+https://***@host/repo.git"),
        ("PUT https://blob.host/a?sv=2022&sig=ab%2Bc%3D&sp=r", "PUT https://blob.host/a?sv=2022&sig=***&sp=r"),
        ("https://s3.host/a?X-Amz-Signature=0f&X-Amz-Date=1", "https://s3.host/a?X-Amz-Signature=***&X-Amz-Date=1"),
        (f"clone with github_pat_{'1A' * 11}_{'b' * 59} now", "clone with *** now"),
        ("key AKIAIOSFODNN7EXAMPLE in AWS", "key *** in AWS"),
        ("got eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl back", "got *** back"),
        ("Authorization: Bearer abcdefgh12345678", "Authorization: Bearer ***"),
        ("{'authorization': 'Basic dXNlcjpwYXNz'}", "{'authorization': 'Basic ***'}"),
        ("curl -H 'bearer abcdefgh12345678'", "curl -H 'bearer ***'"),
        ("the signature of a bearer is key", "the signature of a bearer is key"),
    ],
)
def test_credentials_are_hidden_in_any_text(text: str, hidden: str) -> None:
    assert redact(text) == hidden


def test_items_under_secret_names_and_url_parameters_are_hidden() -> None:
    assert redact({"api_key": ["a", "b"], "token": None, "secret": ("c",)}) == {
        "api_key": ["***", "***"],
        "token": None,
        "secret": ["***"],
    }
    assert redact("get https://host/rm?max=5&api_key=abc#top") == "get https://host/rm?max=5&api_key=***#top"


def test_a_key_of_the_configuration_is_hidden_in_other_texts(tmp_path: Path) -> None:
    key = "4e1f-no-look-of-its-own-77"
    redact({"api_key": key, "wandb": {"key": f"{key}-longer"}})
    finish_summary(tmp_path, "failed", error=f"401 for {key} and {key}-longer")
    summary = read_summary(tmp_path)
    assert summary["error"] == "401 for *** and ***"


def test_config_and_environment_are_written_without_secrets(tmp_path: Path) -> None:
    Tracker(tmp_path, "toy", Config(), seed=0)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["wandb"] == {"key": "***", "project": "p"}
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]

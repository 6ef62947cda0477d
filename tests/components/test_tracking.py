"""What a run leaves behind, and that none of it can stop the run."""

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import yaml

from components.batch import Batch
from components.tracking import (
    Tracker,
    WandbConfig,
    console_line,
    finish_summary,
    read_summary,
    redact,
)

PROJECT = Path(__file__).parents[2]


def records(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.fixture
def tracker(tmp_path: Path) -> Tracker:
    return Tracker(tmp_path / "run", "toy", {"lr": 1e-3}, seed=3)


def test_each_step_is_one_json_line_of_plain_numbers(tracker: Tracker) -> None:
    tracker.log(1, {"reward": torch.tensor(0.5), "tokens": np.int64(7), "note": "x"})
    # The line is there at once, not when the tracker is closed.
    (record,) = records(tracker.run_dir)
    assert record.pop("time") > 1.7e9
    assert record == {"reward": 0.5, "tokens": 7, "note": "x", "step": 1}


def test_numbers_that_json_does_not_know_become_null_and_are_named(tracker: Tracker) -> None:
    tracker.log(1, {"loss": math.nan, "ratio": math.inf, "kl": 0.0})
    (record,) = records(tracker.run_dir)
    assert (record["loss"], record["ratio"], record["kl"]) == (None, None, 0.0)
    assert record["nonfinite"] == ["loss", "ratio"]


def test_metrics_of_steps_that_are_done_again_are_removed_on_resume(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "toy", {}, seed=0)
    for step in (1, 2, 3):
        tracker.log(step, {"try": 1})
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tr')  # killed in the middle of a line
    resumed = Tracker(tmp_path, "toy", {}, seed=0, resume_step=2)
    resumed.log(3, {"try": 2})
    assert [(record["step"], record["try"]) for record in records(tmp_path)] == [(1, 1), (2, 1), (3, 2)]


def test_a_sink_that_fails_is_switched_off_with_one_warning(tracker: Tracker, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        calls = 0

        def log(self, step: int, metrics: Mapping[str, Any]) -> None:
            self.calls += 1
            raise ConnectionError("gone")

        def close(self) -> None:
            raise AssertionError("it is off")

    broken = Broken()
    tracker._sinks["elsewhere"] = broken
    for step in (1, 2, 3):
        tracker.log(step, {"reward": 1.0})
    tracker.close()
    assert broken.calls == 1
    assert [record["step"] for record in records(tracker.run_dir)] == [1, 2, 3]
    messages = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == 1
    assert "elsewhere of" in messages[0]
    assert "is switched off: ConnectionError: gone" in messages[0]


def test_a_run_folder_that_cannot_be_written_to_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Folders where files should go: writing fails even for root.
    for name in ("metrics.jsonl", "summary.json", "config.yaml"):
        (tmp_path / name).mkdir()
    tracker = Tracker(tmp_path, "toy", {}, seed=0)
    tracker.log(1, {"reward": 1.0})
    tracker.update_summary(steps=1)
    tracker.close()
    finish_summary(tmp_path, "failed")
    assert "metrics.jsonl of" in caplog.text


def test_rollouts_are_a_parquet_file_with_a_row_per_sequence(tracker: Tracker) -> None:
    batch = Batch([2, 1], {"tokens": torch.tensor([5, 6, 7])}, {"reward": torch.tensor([1.0, 0.0])})
    tracker.rollouts(12, batch)
    path = tracker.run_dir / "rollouts" / "step_000012.parquet"
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [row["tokens"] for row in rows] == [[5, 6], [7]]
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert list(path.parent.iterdir()) == [path]


def test_the_summary_is_current_all_along_and_closed_by_the_driver(tracker: Tracker) -> None:
    tracker.update_summary(steps=2, seconds={"setup": 1.5}, score={"start": 0.2, "examples": 64})
    tracker.update_summary(seconds={"training": 9.0}, score={"end": 0.8}, tokens_per_second=math.nan)
    assert read_summary(tracker.run_dir) == {
        "recipe": "toy",
        "status": "running",
        "steps": 2,
        "seed": 3,
        "score": {"start": 0.2, "examples": 64, "end": 0.8},
        "seconds": {"setup": 1.5, "warm_start": None, "to_first_step": None, "training": 9.0},
        "peak_memory_bytes": None,
        "tokens_per_second": None,
        "error": None,
    }
    finish_summary(tracker.run_dir, "failed", error="it broke; the key was hf_" + "a" * 20, peak_memory_bytes=10)
    summary = read_summary(tracker.run_dir)
    assert summary is not None
    assert (summary["status"], summary["steps"], summary["peak_memory_bytes"]) == ("failed", 2, 10)
    assert summary["error"] == "it broke; the key was ***"


def test_a_run_that_failed_before_its_trainer_still_has_a_summary(tmp_path: Path) -> None:
    finish_summary(tmp_path / "run", "failed", error="no room", recipe="toy", seed=1)
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert (summary["recipe"], summary["seed"], summary["steps"], summary["error"]) == ("toy", 1, 0, "no room")


def test_a_resumed_run_keeps_its_summary_and_a_new_one_in_the_same_folder_does_not(tmp_path: Path) -> None:
    Tracker(tmp_path, "toy", {}, seed=0).update_summary(score={"start": 0.2})
    finish_summary(tmp_path, "stopped")
    Tracker(tmp_path, "toy", {}, seed=0, resume_step=3)
    resumed = read_summary(tmp_path)
    assert resumed is not None
    assert (resumed["status"], resumed["score"]) == ("running", {"start": 0.2})
    finish_summary(tmp_path, "finished")
    Tracker(tmp_path, "toy", {}, seed=0)
    anew = read_summary(tmp_path)
    assert anew is not None
    assert anew["score"] is None


def test_fields_that_a_summary_does_not_have_are_refused(tracker: Tracker) -> None:
    with pytest.raises(ValueError, match="has no field acore; it has recipe, status,"):
        tracker.update_summary(acore={})
    with pytest.raises(ValueError, match="status='done' is no way for a run to end"):
        finish_summary(tracker.run_dir, "done")  # pyright: ignore[reportArgumentType]


def test_a_console_line_has_four_digits_to_a_number() -> None:
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


def test_keys_and_tokens_are_hidden_by_name_and_nothing_else_is() -> None:
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


def test_config_and_environment_are_written_without_secrets(tmp_path: Path) -> None:
    Tracker(tmp_path, "toy", Config(), seed=0)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["wandb"] == {"key": "***", "project": "p"}
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


@pytest.fixture
def no_wandb_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def test_wandb_without_a_key_is_kept_offline_and_says_so(
    tmp_path: Path, no_wandb_key: None, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    tracker = Tracker(run_dir, "toy", Config(), seed=0, wandb=WandbConfig())
    tracker.log(1, {"reward": 0.5, "loss": math.nan})
    tracker.close()
    assert f"no W&B key found (WANDB_API_KEY or netrc): this run is kept offline in {run_dir}/wandb" in caplog.text
    assert "switched off" not in caplog.text
    (stored,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    # W&B's own process writes the file, some time after finish() has returned.
    deadline = time.monotonic() + 20
    while b"reward" not in stored.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"reward" in stored.read_bytes()


def test_wandb_that_does_not_answer_is_kept_offline_and_the_key_is_not_written(
    tmp_path: Path, no_wandb_key: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    key = "0123456789abcdef" * 2 + "01234567"
    tracker = Tracker(tmp_path, "toy", {}, seed=0, wandb=WandbConfig(key=key, init_timeout=1.0))
    tracker.log(1, {"reward": 0.5})
    tracker.close()
    assert "W&B does not answer" in caplog.text
    assert "switched off" not in caplog.text
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert key.encode() not in written
    assert not (tmp_path / "no-netrc").exists()

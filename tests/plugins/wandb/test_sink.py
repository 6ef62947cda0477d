"""W&B as a metric sink: one run over all attempts, and no key in the run folder."""

import json
import logging
import math
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from wandb.proto import wandb_internal_pb2

from components.batch import Batch
from tests.messages import says
from training.tracking import EventLog, Tracker, finish_summary

PROJECT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_wandb_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of this project, without those of libraries."""
    return [
        r.message
        for r in caplog.records
        if r.levelno >= logging.WARNING and r.name.startswith(("training.", "plugins."))
    ]


def stored_records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: 7 bytes of header, then blocks of 32 KiB with checksum, length, type,
    data.
    """
    data = path.read_bytes()
    at = 7
    record = b""
    while at + 7 <= len(data):
        space = 32768 - at % 32768
        if space < 7:
            at += space
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
            record = b""


def wandb_records(run_dir: Path, attempts: int = 1) -> list[list[Any]]:
    """Return the records of every attempt, oldest first. Waits for them, because a process of W&B writes them."""
    deadline = time.monotonic() + 300
    while True:
        stored = [list(stored_records(path)) for path in run_dir.glob("wandb/offline-run-*/run-*.wandb")]
        done = [any(record.WhichOneof("record_type") == "exit" for record in records) for records in stored]
        if done == [True] * attempts:
            return sorted(stored, key=lambda records: first_run(records).start_time.ToNanoseconds())
        assert time.monotonic() < deadline, f"{len(stored)} attempts, ended: {done}"
        time.sleep(0.05)


def first_run(records: list[Any]) -> Any:
    return next(record.run for record in records if record.WhichOneof("record_type") == "run")


def history(records: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_wandb_without_a_key_is_offline_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = tmp_path / "run"
    tracker = Tracker(run_dir, "toy", {"lr": 1e-3}, seed=0, sinks={"wandb": {}})
    tracker.log(1, {"reward": 0.5, "loss": math.nan, "heads": {"a": torch.tensor(2.0)}})
    tracker.close()
    (warning,) = warnings_of(caplog)
    assert re.search(says("WANDB_API_KEY", "netrc", run_dir / "wandb"), warning)
    (records,) = wandb_records(run_dir)
    (row,) = history(records)
    assert (row["step"], row["reward"], row["heads/a"]) == (1, 0.5, 2.0)
    config = {item.key: json.loads(item.value_json) for item in first_run(records).config.update}
    assert config["lr"] == 1e-3
    assert config["environment"]["packages"]["torch"] == torch.__version__


@pytest.mark.full
def test_unreachable_wandb_is_offline_and_the_key_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no process listens there
    key = "0123456789abcdef" * 2 + "01234567"
    tracker = Tracker(tmp_path, "toy", {}, seed=0, sinks={"wandb": {"key": key, "init_timeout": 10.0}})
    tracker.log(1, {"reward": 0.5})
    tracker.close()
    (warning,) = warnings_of(caplog)
    assert re.search(says("W&B", tmp_path / "wandb"), warning)
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert key.encode() not in written
    assert not (tmp_path / "no-netrc").exists()


def test_a_resumed_run_continues_its_wandb_run_and_its_steps_may_decrease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = Tracker(tmp_path, "toy", {"lr": 1}, seed=0, sinks={"wandb": {}})
    for step in (1, 2, 3):
        first.log(step, {"try": 1})
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    assert len(state["wandb_id"]) == 8
    resumed = Tracker(tmp_path, "toy", {"lr": 2}, seed=0, sinks={"wandb": {}}, resume_step=1, state=state)
    assert resumed.state_dict() == state
    for step in (2, 3):
        resumed.log(step, {"try": 2})
    resumed.close()
    attempts = wandb_records(tmp_path, attempts=2)
    rows = [[(row["step"], row["try"]) for row in history(records)] for records in attempts]
    assert rows == [[(1, 1), (2, 1), (3, 1)], [(2, 2), (3, 2)]]
    runs = [first_run(records) for records in attempts]
    assert [run.run_id for run in runs] == [state["wandb_id"]] * 2
    # With this record `wandb sync` appends the second part to the first one instead of replacing it.
    assert [run.resume for run in runs] == [False, True]
    for records in attempts:
        metrics = {r.metric.glob_name or r.metric.name: r.metric for r in records if r.HasField("metric")}
        assert metrics["*"].step_metric == "step"


def test_without_wandb_there_is_no_run_id_and_a_new_run_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"wandb_id": "abcdefgh"}
    assert Tracker(tmp_path, "toy", {}, seed=0, state=state).state_dict() == {}
    # An attempt whose W&B fails passes the id on to the next attempt.
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    broken = Tracker(tmp_path, "toy", {}, seed=0, sinks={"wandb": {}}, state=state)
    assert "W&B" not in broken._sinks
    assert broken.state_dict() == state


def test_samples_are_one_incremental_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = Tracker(tmp_path, "toy", {}, seed=0, sinks={"wandb": {}})
    tracker.samples(1, list)
    tracker.samples(1, lambda: [{"prompt": "p1", "reward": torch.tensor(0.5)}, {"reward": "none", "prompt": "p2"}])
    tracker.samples(4, lambda: [{"prompt": "p3", "more": 1}])
    tracker.close()
    wandb_records(tmp_path)
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"), key=lambda path: path.name)
    tables = [json.loads(path.read_text()) for path in tables]
    assert [table["columns"] for table in tables] == [["step", "prompt", "reward"]] * 2
    assert [table["data"] for table in tables] == [[[1, "p1", 0.5], [1, "p2", "none"]], [[4, "p3", None]]]


def test_a_dead_wandb_service_gives_one_warning(tmp_path: Path) -> None:
    code = """
    import logging, os, sys
    import psutil
    from training.tracking import Tracker
    logging.basicConfig(format="%(message)s")
    tracker = Tracker(sys.argv[1], "toy", {}, 0, sinks={"wandb": {}})
    tracker.log(1, {"reward": 1.0})
    services = psutil.Process().children()
    assert len(services) == 1
    services[0].kill()
    services[0].wait()
    for step in range(2, 50):
        tracker.log(step, {"reward": 1.0})
    tracker.close()
    logging.shutdown()
    os._exit(0)  # W&B's own farewell to its service would be printed
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=540,
        cwd=PROJECT,
        # Without WANDB_SERVICE, which would select the service of this process.
        env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"} | {"WANDB_MODE": "offline"},
    )
    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    assert re.search(says("W&B", tmp_path), warning)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 49


@dataclass
class FailedEvent:
    text: str


SECRETS = {
    "wandb": "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c",
    "hub": "hf_" + "Zq" * 17,
    "nested": "no-look-of-a-key-at-all-1",
    "listed": "no-look-of-a-key-at-all-2",
    "argument": "no-look-of-a-key-at-all-3",
    "environment": "no-look-of-a-key-at-all-4",
    "login": "s3cr3t-login",
    "code": "sk-" + "code" * 8,
}


def test_no_file_of_the_run_folder_has_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code"
    code.mkdir()
    # W&B would read the repository of the working directory, and the command line.
    subprocess.run(["git", "init", "-q", str(code)], check=True)
    address = f"https://{SECRETS['hub']}:{SECRETS['login']}@host/x.git"
    subprocess.run(["git", "-C", str(code), "remote", "add", "origin", address], check=True)
    monkeypatch.chdir(code)
    monkeypatch.setattr(sys, "argv", ["main.py", "--use_wandb", SECRETS["argument"]])
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", SECRETS["wandb"])):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SERVICE_TOKEN", SECRETS["environment"])

    run_dir = tmp_path / "run"
    config = {
        "use_wandb": SECRETS["wandb"],
        "reward_url": f"https://{SECRETS['hub']}@huggingface.co/rm",
        "remote": {"url": f"https://me:{SECRETS['login']}@host", "api_key": SECRETS["nested"]},
        "command": ["main.py", "--use_wandb", SECRETS["argument"], f"judge.token={SECRETS['listed']}"],
    }
    # A login that occurs only in a URL can be recognised only there.
    everything = (
        " ".join(value for name, value in SECRETS.items() if name != "login") + f" ftp://a:{SECRETS['login']}@b"
    )
    sinks = {"tensorboard": {}, "wandb": {"key": SECRETS["wandb"]}}
    tracker = Tracker(run_dir, "toy", config, 0, sinks=sinks)
    events = EventLog(run_dir / "events.jsonl")
    tracker.log(1, {"note": everything, "reward": 1.0})
    tracker.samples(1, lambda: [{"prompt": everything, "reward": 1.0}])
    tracker.rollouts(1, Batch([1], {"tokens": torch.tensor([1])}))
    events(FailedEvent(everything))
    tracker.close()
    events.close()
    finish_summary(run_dir, "failed", error=everything)
    wandb_records(run_dir)

    files = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    kinds = {path.suffix for path in files}
    assert {".yaml", ".json", ".jsonl", ".parquet", ".wandb", ".log"} <= kinds
    assert any("tfevents" in path.name for path in files)
    leaks = [(name, path) for name, value in SECRETS.items() for path in files if value.encode() in files[path]]
    assert leaks == []
    # Check of the search: values that are not secret are found in each of these files.
    assert sum(b"***" in content for content in files.values()) >= 6


def test_wandb_leaves_nothing_outside_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = Tracker(tmp_path / "run", "toy", {}, 0, sinks={"wandb": {}})
    tracker.samples(1, lambda: [{"prompt": "a"}])
    tracker.close()
    assert list(home.rglob("*")) == []
    assert "WANDB_DATA_DIR" not in os.environ
    assert warnings_of(caplog) == []

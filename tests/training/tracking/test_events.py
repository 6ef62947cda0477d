"""events.jsonl and environment.json: the events of a run with their times, and its environment."""

import json
import logging
import math
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says
from training.tracking import EventLog
from training.tracking.environment import git_state, write_environment

PROJECT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Place:
    node: str
    load: float


@dataclass(frozen=True)
class CallEvent:
    method: str
    seconds: float | None = None
    where: Place = field(default_factory=lambda: Place("n1", 0.5))


@dataclass(frozen=True)
class WorkerLost:
    text: str


def events(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_an_event_is_written_immediately_as_a_line_with_its_class_name(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run" / "events.jsonl")
    log(CallEvent("update", 1.5))
    log(WorkerLost("actor 3"))
    assert events(log.path) == [
        {"event": "call", "method": "update", "seconds": 1.5, "where": {"node": "n1", "load": 0.5}},
        {"event": "worker_lost", "text": "actor 3"},
    ]


def test_events_are_strict_json_without_secrets(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log(CallEvent(f"with hf_{'a' * 20}", math.nan, Place("https://me:pw@host", -math.inf)))
    assert events(log.path) == [
        {
            "event": "call",
            "method": "with ***",
            "seconds": None,
            "where": {"node": "https://***@host", "load": None},
            "nonfinite": ["seconds", "where"],
        }
    ]


def test_a_resumed_run_appends_events_even_after_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = EventLog(path)
    first(WorkerLost("a"))
    first.close()
    first(WorkerLost("after the end"))
    with path.open("a") as file:
        file.write('{"event": "wor')  # killed in the middle of a line
    EventLog(path)(WorkerLost("b"))
    lines = path.read_text().splitlines()
    assert [json.loads(lines[0])["text"], lines[1], json.loads(lines[2])["text"]] == ["a", '{"event": "wor', "b"]


def test_an_event_log_that_cannot_be_opened_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.jsonl").mkdir()
    log = EventLog(tmp_path / "events.jsonl")
    log(WorkerLost("a"))
    log.close()
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(says(log.path, "IsADirectoryError"), warning)


def test_an_event_log_that_gets_an_invalid_event_gives_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log({"text": "a mapping"})
    log(WorkerLost("a"))
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(says(log.path, "TypeError"), warning)
    assert log.path.read_text() == ""


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=trunk"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_code_state_has_commit_branch_and_changed_files(tmp_path: Path) -> None:
    git(tmp_path, "init")
    for name in ("a b.py", "c.py"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "branch": "trunk", "dirty": False, "changed_files": []}
    (tmp_path / "a b.py").write_text("2")
    git(tmp_path, "mv", "c.py", "d.py")
    for number in range(60):
        (tmp_path / f"new_{number:02}").write_text("")
    git(tmp_path, "checkout", "--detach")
    state = git_state(tmp_path)
    assert state is not None
    assert (state["branch"], state["dirty"], len(state["changed_files"])) == (None, True, 50)
    assert state["changed_files"][:4] == ["a b.py", "c.py", "d.py", "new_00"]


def test_code_outside_of_git_has_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init")
    installed = tmp_path / ".venv" / "lib"
    installed.mkdir(parents=True)
    (installed / "code.py").write_text("")
    (tmp_path / ".gitignore").write_text(".venv")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    assert git_state(tmp_path) is not None
    assert git_state(installed) is None
    monkeypatch.setenv("PATH", str(installed))  # git is not available
    assert git_state(tmp_path) is None


def test_the_environment_file_has_the_newest_start_and_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text('{"time": "half a fi')
    first = write_environment(tmp_path)
    second = write_environment(tmp_path)
    third = write_environment(tmp_path)
    assert json.loads((tmp_path / "environment.json").read_text()) == {**third, "earlier": [first, second]}
    assert third["hardware"]["memory_bytes"] > 2**28
    assert third["hardware"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert third["hostname"] == os.uname().nodename


def test_gpus_are_named_by_nvidia_smi_with_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --query-gpu=name ] && echo "NVIDIA H200" && echo "NVIDIA H200"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("training.tracking.environment._TIMEOUT_S", 300.0)
    assert write_environment(tmp_path)["hardware"]["gpus"] == ["NVIDIA H200", "NVIDIA H200"]
    program.write_text("#!/bin/sh\nexec sleep infinity\n")
    monkeypatch.setattr("training.tracking.environment._TIMEOUT_S", 0.2)
    assert write_environment(tmp_path)["hardware"]["gpus"] == []

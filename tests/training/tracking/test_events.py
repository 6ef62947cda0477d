"""events.jsonl: the events of a run with their times."""

import json
import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says
from training.tracking import EventLog

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

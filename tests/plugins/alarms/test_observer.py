"""Alarms as an observer of a run."""

import json
from pathlib import Path
from typing import Any

from plugins.alarms.observer import AlarmObserver
from training.tracking import AlarmEvent, EventLog, StepEvent


def test_a_resumed_run_knows_the_initial_metrics(tmp_path: Path) -> None:
    # a line without a value, and half a line
    lines = ("7", '{"step": 1, "actor/entropy": 1.0, "reward/score": null}', '{"step": 2, "ac')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    said, bell = list[Any](), AlarmObserver({"train.learning_rate"})
    bell.start(tmp_path, said.append)
    for step in (2, 3):
        bell(StepEvent(step, 10, 0.0, {"actor/entropy": 0.05}))  # not less than in the first step after the resume
    assert [(event.alarm, event.step) for event in said] == [("entropy", 3)]


def test_an_alarm_is_printed_and_logged_once_also_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    # A call event, an incomplete line, and an event of a user's class.
    path.write_text('{"event": "call", "method": "alarm"}\n{"event": "alarm", "al\n{"event": "alarm"}\n')
    said: list[Any] = []
    for step in (1, 2):
        events = EventLog(path)
        bell = AlarmObserver({"train.learning_rate"})

        def emit(event: Any, events: EventLog = events) -> None:
            events(event)
            said.append(event)

        bell.start(tmp_path, emit)
        bell(StepEvent(step, 10, 0.0, {"actor/approx_kl": 9.0}))
        bell(said[0])  # an event of another class
        events.close()
    written = [json.loads(line) for line in path.read_text().splitlines()[3:]]
    assert [(event["event"], event["alarm"], event["step"]) for event in written] == [("alarm", "kl", 1)]
    assert [(type(event), event.text) for event in said] == [(AlarmEvent, written[0]["text"])]

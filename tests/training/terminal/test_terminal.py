"""Output of a run without a live view."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.training.terminal.run_events import call, step
from training.terminal.terminal import Terminal
from training.tracking import AlarmEvent, StepEvent

PATIENCE_S = 300.0


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    environment = os.environ | {"TERM": "xterm-256color", "CI": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.terminal.terminal_roles", *arguments], env=environment, **options
    )


def test_a_closed_pipe_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with Terminal("demo", tmp_path, {}, "ray", time.time()) as terminal:
            for number in (1, 2):
                print("said", flush=True)
                terminal(step(number, reward__score=0.5))
    assert (tmp_path / "logs" / "driver.log").read_text().count("Broken pipe") == 1


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_without_a_terminal_each_step_and_alarm_is_one_line(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stdout
    with Terminal("demo", tmp_path, {"TRAINER": 1}, backend, time.time()) as terminal:
        assert (sys.stdout is before) == (backend == "local")  # a debugger uses it
        print("said")
        terminal(step(3, reward__score=0.51234567, actor__kl=1e-9))
        terminal(StepEvent(4, 10, 0.0, {"actor/loss": 1.0}))  # none of it is meant for the user
        terminal(AlarmEvent("kl", 3, 0.0, "the policy is far away", "lower the learning rate"))
        terminal(call("ACTOR", 0, "update"))
        print("the end of it", end="")
    assert sys.stdout is before
    assert capsys.readouterr().out.splitlines() == [
        "said",
        "step=3 reward/score=0.5123 actor/kl=1e-09",
        "warning: the policy is far away; lower the learning rate",
        "the end of it",
    ]


# --- a whole run


@pytest.mark.full
def test_output_to_a_pipe_has_one_line_per_step_and_no_cursor_codes(tmp_path: Path) -> None:
    process = start([str(tmp_path), "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err.decode()) == (0, "")
    assert out.decode().splitlines()[:6] == [
        f"demo: run folder {tmp_path}",
        "warning: of our own",
        "the first line",
        *(f"step={number} reward/score={number / 4:.4g} timing_s/step=0.5" for number in (1, 2, 3)),
    ]
    assert "dull" in (tmp_path / "logs" / "driver.log").read_text()

"""The live view: contents of a frame, drawing, and a run on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from core import JobEvent, MemoryEvent
from plugins.live_view import screen
from plugins.live_view.run_view import RunView, sparkline
from plugins.live_view.screen import Screen
from tests.messages import says
from tests.training.terminal.run_events import call, step
from training.tracking import AlarmEvent, PhaseEvent

PATIENCE_S = 300.0
PATIENT_RUN = f"""
import sys
from plugins.live_view import screen
from tests.training.terminal import terminal_roles
screen._LAST_FRAME_WITHIN_S = {PATIENCE_S}
sys.exit(terminal_roles.main(*sys.argv[1:]))
"""
"""Program that runs the view and draws its last frame even on a busy machine."""


class Clock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def view_of(roles: dict[str, int], clock: Clock) -> RunView:
    view = RunView("grpo  runs/a", roles, time.time(), clock)
    view._began = clock()  # independent of pauses of this process
    view.take(JobEvent("start", 0.0))
    return view


def shown(view: RunView, width: int = 79, height: int = 23) -> list[str]:
    return [line.plain.rstrip() for line in view.frame(width, height)]


def role_line(view: RunView, role: str) -> tuple[str, list[str]]:
    """Return the line of a role, and the styles in it."""
    (line,) = [line for line in view.frame(100, 40) if line.plain.startswith(role)]
    return " ".join(line.plain.split()), [str(span.style) for span in line.spans]


# --- what a frame holds


def test_a_frame_shows_progress_curves_roles_and_a_response() -> None:
    clock = Clock()
    view = view_of({"TRAINER": 1, "ROLLOUT": 4}, clock)
    for number, score in enumerate((0.0, 0.5, 1.0), start=1):
        clock.now += 20
        sample = {"prompt": "1+1=", "response": "2\nor 3", "reward": 0.5, "label": "2"}
        view.take(step(number, sample=sample, reward__score=score, eval__score=0.25, actor__approx_kl=0.00123456))
    view.take(PhaseEvent("generate", 7.0))
    for rank in (3, 0):
        view.take(call("ROLLOUT", rank, "generate"))
        clock.now += 2
    view.take(AlarmEvent("kl", 3, 0.0, "the policy is far away", "lower the learning rate"))
    view.take(MemoryEvent(0.0, {"DRIVER": 10**9, "ROLLOUT": 2 * 10**9}))
    assert shown(view) == [
        "── grpo  runs/a ───────────────────────────────────────────────────────────────",
        # 2 steps in 40 s: 7 more take 140 s, of which 4 have gone.
        "step 3 of 10  about 2 min 16 s left  1 min 04 s elapsed  3.0 GB  ━━━━──────────",
        "reward/score          1  ▁▅█",
        "eval/score         0.25  ▄▄▄",
        "actor/approx_kl 0.001235",
        "TRAINER     generate  4 s",
        "ROLLOUT x4  generate  4 s  2 ranks, rank 3 longest",
        "! step 3: the policy is far away; lower the learning rate",
        "a response of step 3: reward 0.5, label 2",
        "1+1=",
        "2↵or 3",
    ]
    # The least important lines are omitted first if the terminal is too small.
    assert shown(view, 79, 6) == [*shown(view)[:4], *shown(view)[5:7]]
    assert shown(view, 79, 1) == shown(view)[1:2]


@pytest.mark.parametrize("width", [10, 20, 59, 79, 199])
def test_a_frame_is_neither_wider_nor_higher_than_the_terminal(width: int) -> None:
    view = view_of({"TRAINER": 1, "A_ROLE_WITH_A_LONG_NAME": 1000}, Clock())
    view.take(call("A_ROLE_WITH_A_LONG_NAME", 7, "a_method_with_a_long_name_too"))
    view.take(
        step(
            1, sample={"prompt": "問" * 300, "response": "答 " * 300, "reward": 1}, reward__score=0.1, x__y=float("nan")
        )
    )
    view.take(AlarmEvent("a", 1, 0.0, "t" * 300, "a" * 300))
    for height in (0, 1, 3, 10, 50):
        frame = view.frame(width, height)
        assert len(frame) <= height
        assert all(line.cell_len <= width for line in frame)


def test_a_call_is_yellow_after_one_minute_and_red_after_five() -> None:
    clock = Clock()
    view = view_of({"TRAINER": 1, "ROLLOUT": 2, "ACTOR": 1}, clock)
    for rank in (0, 1):
        view.take(call("ROLLOUT", rank, "generate"))
    clock.now += 59
    assert role_line(view, "ROLLOUT") == ("ROLLOUT x2 generate 59 s", ["green"])
    clock.now += 2
    view.take(replace(call("ROLLOUT", 0, "generate"), seconds=61.0))
    assert role_line(view, "ROLLOUT") == ("ROLLOUT x2 generate 1 min 01 s rank 1", ["yellow"])
    clock.now += 300
    assert role_line(view, "ROLLOUT") == ("ROLLOUT x2 generate 6 min 01 s rank 1", ["bold red"])
    assert role_line(view, "TRAINER") == ("TRAINER sets up 6 min 01 s", ["bold red"])
    assert role_line(view, "ACTOR") == ("ACTOR idle 6 min 01 s", ["dim"])
    view.take(replace(call("ROLLOUT", 1, "generate"), seconds=361.0))
    assert role_line(view, "ROLLOUT") == ("ROLLOUT x2 idle 0 s", ["dim"])


def test_a_lost_worker_is_shown_as_starting_and_after_a_restart_all_workers_are() -> None:
    clock = Clock()
    view = view_of({"TRAINER": 1, "ACTOR": 1, "ROLLOUT": 2}, clock)
    view.take(call("ROLLOUT", 1, "generate"))
    view.take(JobEvent("lost", 0.0, "ROLLOUT-1+ACTOR-0", "died"))
    clock.now += 3
    assert role_line(view, "ROLLOUT")[0] == "ROLLOUT x2 starts 3 s rank 1"
    assert role_line(view, "ACTOR")[0] == "ACTOR starts 3 s"
    view.take(JobEvent("replaced", 0.0, "ROLLOUT-1+ACTOR-0"))
    assert role_line(view, "ROLLOUT")[0] == "ROLLOUT x2 idle 0 s 1 replaced"
    view.take(call("ACTOR", 0, "update"))
    view.take(JobEvent("restart", 0.0, "", "all died"))
    assert "attempt 2" in shown(view)[1]
    assert role_line(view, "ACTOR")[0] == "ACTOR starts 0 s 1 replaced"


def test_the_remaining_time_follows_recent_steps_and_resets_after_a_restart() -> None:
    clock = Clock()
    view = view_of({"TRAINER": 1}, clock)
    view.take(step(1, 100))
    assert "left" not in shown(view)[1]
    clock.now += 1000  # a slow step, which no longer counts 20 steps later
    for number in range(2, 23):
        view.take(step(number, 100))
        clock.now += 10
    assert "about 12 min 50 s left" in shown(view)[1]  # 78 steps of 10 s remain, of which 10 s have passed
    view.take(step(5, 100))
    assert "left" not in shown(view)[1]
    view.take(JobEvent("end", 0.0, "", "failed: no numbers"))
    clock.now += 1000
    assert "step 5 of 100  failed  20 min 10 s elapsed" in shown(view)[1]


@pytest.mark.parametrize(
    ("names", "curves", "others"),
    [
        (["actor/loss", "actor/grad_norm", "eval/loss"], ["actor/loss", "eval/loss"], 1),  # sft
        (["actor/loss", "actor/accuracy", "actor/margin", "eval/x"], ["actor/loss", "actor/accuracy", "eval/x"], 1),
        (["critic/loss", "actor/accuracy"], ["critic/loss", "actor/accuracy"], 0),
        (["reward/score", "rollout/response_length", "eval/score"], ["reward/score", "eval/score"], 1),
        (["my_metric"], ["my_metric"], 0),
        ([], [], 0),
    ],
)  # fmt: skip
def test_curves_show_the_reward_or_the_loss_and_an_evaluation(names: list[str], curves: list[str], others: int) -> None:
    view = view_of({}, Clock())
    metrics: dict[str, Any] = {name.replace("/", "__"): 0.5 for name in names}
    view.take(step(1, **metrics))
    lines = shown(view)[2:]
    assert [line.split()[0] for line in lines[: len(curves)]] == curves
    assert sum(len(line.split("  ")) for line in lines[len(curves) :]) == others


def test_a_sparkline_shows_means_of_equal_numbers_of_values_without_nan() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 4, 4, 8, 8], 3) == "▁▅█"
    assert sparkline([8, 0, 0, 4, 4], 3) == "█▁▅"  # the first point is of a single value
    assert sparkline([2, float("nan"), 2, float("inf")], 5) == "▄▄"
    assert sparkline([], 5) == sparkline([1.0], 0) == ""


def test_events_of_user_code_are_ignored() -> None:
    view = view_of({"TRAINER": 1}, Clock())
    before = shown(view)
    for name in ("Step", "Phase", "Alarm", "Memory", "CallEvent"):
        view.take(type(name, (), {})())
    assert shown(view) == before


# --- drawing


def on_screen(written: str) -> list[str]:
    """Return the lines on a terminal that interprets the escape sequences of `Screen`. Lines must fit its width."""
    lines = [""]
    row = 0
    column = 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif re.fullmatch(r"\x1b\[\d+A", part):
            row -= int(part[2:-1])
        elif part in ("\x1b[J", "\x1b[K"):
            lines[row] = lines[row][:column]
            del lines[row + 1 if part[-1] == "J" else len(lines) :]
        elif not part.startswith("\x1b["):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return lines


def resize(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.fixture
def glass(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Yield both ends of a terminal: (output for the user, input from the program). The last frame has no deadline."""
    monkeypatch.setattr(screen, "_LAST_FRAME_WITHIN_S", PATIENCE_S)
    person, program = pty.openpty()
    resize(program, 80, 24)
    yield person, program
    os.close(person)


def read_on(person: int, so_far: str = "", until_text: str | None = None) -> str:
    """Read output until a text appears, or without one until the other end is closed. Return all output."""
    deadline = time.monotonic() + PATIENCE_S
    while until_text is None or until_text not in so_far:
        assert time.monotonic() < deadline, so_far
        if select.select([person], [], [], 1.0)[0]:
            try:
                part = os.read(person, 65536)
            except OSError:
                part = b""
            if not part:
                return so_far
            so_far += part.decode(errors="replace")
    return so_far


def test_lines_scroll_above_the_frame_and_a_narrower_window_leaves_no_parts_behind(glass: tuple[int, int]) -> None:
    person, program = glass
    drawn = Screen(os.dup(program), lambda width, height: [Text("x" * 60), Text(f"{width} {height}")], "utf-8")
    text = read_on(person, until_text="79 23")
    drawn.info("one\x1b[2J")
    text = read_on(person, text, until_text="one")
    drawn.info("two")
    text = read_on(person, text, until_text="two")
    resize(program, 40, 24)
    # The line of 60 cells now occupies two lines.
    assert "\x1b[3A\r" in read_on(person, until_text="39 23")
    drawn.close()
    os.close(program)
    assert on_screen(text)[:2] == ["one�[2J", "two"]


def test_a_blocked_terminal_does_not_block_the_caller(glass: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_LAST_FRAME_WITHIN_S", 0.1)
    drawn = Screen(os.dup(glass[1]), lambda *_: [Text("frame")], "utf-8")
    for _ in range(2000):
        drawn.info("x" * 70)  # more than the buffer of a terminal
    drawn.close()
    os.close(glass[1])


def test_a_failing_view_is_switched_off_and_lines_are_still_printed(
    glass: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(width: int, height: int) -> list[Text]:
        raise RuntimeError(f"{width} {height}")

    drawn = Screen(os.dup(glass[1]), broken, "utf-8")
    drawn.info("still here")
    drawn.close()
    os.close(glass[1])
    assert "still here" in read_on(glass[0])
    # A late message from the screen of another test, whose terminal is closed, may appear.
    failures = [record for record in caplog.records if record.exc_info and record.exc_info[0] is RuntimeError]
    assert len(failures) == 1


# --- a whole run


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    environment = os.environ | {"TERM": "xterm-256color", "CI": ""}
    return subprocess.Popen([sys.executable, "-c", PATIENT_RUN, *arguments], env=environment, **options)


@pytest.mark.full
def test_a_hanging_call_is_shown_on_a_terminal_until_two_interrupts_end_the_run(
    tmp_path: Path, glass: tuple[int, int]
) -> None:
    person, program = glass
    resize(program, 200, 40)
    process = start([str(tmp_path), "600"], stdin=program, stdout=program, stderr=program)
    os.close(program)
    text = read_on(person, until_text="SLEEPER x2  \x1b[32mslumber")
    text = read_on(person, text, until_text="step 3 of 3")
    os.kill(process.pid, signal.SIGINT)
    text = read_on(person, text, until_text="Ctrl-C")
    os.kill(process.pid, signal.SIGINT)
    text = read_on(person, text)
    assert process.wait(PATIENCE_S) == 130
    lines = [line.rstrip() for line in on_screen(text)]
    (stopping,) = [line for line in lines if "Ctrl-C" in line]
    assert [line for line in lines if line.startswith(("warning", "the first", stopping))] == [
        "warning: of our own",
        "the first line",
        stopping,
    ]
    (top,) = [number for number, line in enumerate(lines) if line.startswith("── demo")]
    assert re.fullmatch(r"step 3 of 3  stopped  .* elapsed(  .* GB)?  ━*", lines[top + 1])
    assert lines[top + 2].split() == ["reward/score", "0.75", "▁▅█"]
    assert re.fullmatch(r"SLEEPER x2  slumber +\d.*", lines[top + 5])
    assert lines[top + 6 : top + 9] == ["a response of step 3: reward 1", "1+1=", "�[2J[bold]2[/bold] �"]
    assert lines[-1] == ""
    assert re.search(says("demo: stopped", tmp_path / "logs"), lines[-2])
    assert "odd" not in text
    log = (tmp_path / "logs" / "driver.log").read_text()
    assert log.startswith("raylet: something is odd\nwritten by C\n")
    assert "dull" in log

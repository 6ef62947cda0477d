"""Requests for engines reach the run through its folder."""

from __future__ import annotations

import runpy
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plugins.elastic.requests import FOLDER, FleetState, discard, read_state, send_request, take_requests, write_state

SCRIPT = Path(__file__).parents[3] / "scripts" / "engines.py"


@pytest.fixture
def main() -> Callable[[list[str]], int]:
    """The function `main` of scripts/engines.py."""
    return runpy.run_path(str(SCRIPT))["main"]


def test_requests_are_taken_once_in_their_order_and_damaged_files_are_removed(tmp_path: Path) -> None:
    write_state(tmp_path, FleetState(2, ("ROLLOUT-0", "ROLLOUT-1")))
    send_request(tmp_path, 2)
    send_request(tmp_path, -1)
    (tmp_path / FOLDER / "request-damaged.json").write_text("{")
    assert take_requests(tmp_path) == [2, -1]
    assert take_requests(tmp_path) == []
    assert read_state(tmp_path) == FleetState(2, ("ROLLOUT-0", "ROLLOUT-1"))


def test_a_run_without_elastic_engines_is_refused(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "add", "1"]) == 2
    assert "placement.elastic=true" in capsys.readouterr().err


def test_the_command_ends_if_the_run_has_ended(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(tmp_path, FleetState(1, ("ROLLOUT-0",)))
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    assert main([str(tmp_path), "add", "1"]) == 1
    assert "the run has ended" in capsys.readouterr().err
    # The run would take it when it is resumed.
    assert take_requests(tmp_path) == []


def test_the_same_request_is_answered_again_and_one_that_is_not_taken_is_withdrawn(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text('{"status": "running"}')
    note = "3 engines were requested; the minimum is 1, the maximum elastic.max_engines=2"
    write_state(tmp_path, FleetState(2, ("ROLLOUT-0", "ROLLOUT-1"), note, requests=1))
    assert main([str(tmp_path), "add", "--within", "0.1"]) == 1
    assert "not reached within 0.1 s" in capsys.readouterr().err
    assert take_requests(tmp_path) == []

    def take() -> None:
        while not take_requests(tmp_path):
            time.sleep(0.01)
        write_state(tmp_path, FleetState(2, ("ROLLOUT-0", "ROLLOUT-1"), note, requests=2))

    run = threading.Thread(target=take, daemon=True)
    run.start()
    assert main([str(tmp_path), "add", "--within", "20"]) == 1
    assert f"3 engines were requested: {note}" in capsys.readouterr().err
    run.join()


def test_requests_and_state_of_an_earlier_run_are_discarded(tmp_path: Path) -> None:
    discard(tmp_path)
    write_state(tmp_path, FleetState(2, ("ROLLOUT-0", "ROLLOUT-1")))
    send_request(tmp_path, 1)
    discard(tmp_path)
    assert list((tmp_path / FOLDER).iterdir()) == []

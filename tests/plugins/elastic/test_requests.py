"""Requests for engines reach the run through its folder."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from plugins.elastic.requests import FOLDER, FleetState, read_state, send_request, take_requests, write_state

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

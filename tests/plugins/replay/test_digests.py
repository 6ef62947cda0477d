"""Digests are read back by step and role, and a folder that cannot be written does not end a run."""

import logging
from pathlib import Path

import pytest

from plugins.replay.digests import append_line, read_digests


def test_the_last_line_of_a_step_and_role_is_used(tmp_path: Path) -> None:
    for step, role, digest in ((1, "actor", "aa"), (1, "critic", "bb"), (2, "actor", "cc"), (1, "actor", "dd")):
        append_line(str(tmp_path), step, role, digest)
    assert read_digests(tmp_path) == {(1, "actor"): "dd", (1, "critic"): "bb", (2, "actor"): "cc"}


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = tmp_path / "missing"
    with caplog.at_level(logging.WARNING):
        append_line(str(missing), 1, "actor", "aa")
        append_line(str(missing), 2, "actor", "bb")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"digests.jsonl of {missing} cannot be written, and replays cannot compare weights"
    ]
    assert read_digests(missing) == {}

"""An engine and its processes do not inherit the process group of the role that starts them."""

from __future__ import annotations

import os

import pytest

from components.generate.engine_start import started


def test_engine_starts_without_the_variables_of_the_process_group_which_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    environment = started(lambda: dict(os.environ))
    assert not group.keys() & environment.keys()
    assert os.environ.items() >= group.items()

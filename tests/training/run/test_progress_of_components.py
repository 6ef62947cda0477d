"""Progress of components reaches core's hang detection in every process of a recipe."""

import pytest

import core.supervise.control
import training
from components.process.heartbeat import beat


def test_progress_reported_by_components_reaches_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert training.__file__
    monkeypatch.setattr(core.supervise.control, "_last_beat", 0.0)
    beat()
    assert core.supervise.control._last_beat > 0.0

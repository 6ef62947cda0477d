"""A job with a rank that hangs: the supervisor's message, and the restart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from core import JobBuilder, JobEvent
from tests.messages import says
from tests.plugins.collective_watch.job_roles import Settings

STALL_S = 10.0


@pytest.mark.nightly
@pytest.mark.parametrize("stopped", [0, 1])
def test_the_message_of_a_stalled_job_says_who_waits_for_whom_before_the_stall_timeout(
    tmp_path: Path, ray_cluster: None, stopped: int
) -> None:
    events: list[Any] = []
    builder = JobBuilder().device_type("CPU").config(Settings(tmp_path, stopped, STALL_S))
    builder.recovery(max_restarts=1, stall_timeout=STALL_S)
    builder.role("trainer").run("tests.plugins.collective_watch.job_roles:Trainer").resource(cpu=0.25)
    builder.role("actor").train("tests.plugins.collective_watch.job_roles:Rank").total(2).resource(cpu=0.25)
    result = builder.build().submit("stalled", log_dir=tmp_path / "logs", observers=[events.append])
    assert (result.status, result.attempt, result.error) == ("finished", 2, "")
    assert (tmp_path / "result").read_text() == "[2.0, 2.0]"
    hung = [event for event in events if isinstance(event, JobEvent) and event.kind == "hung"]
    assert hung[0].process == f"ACTOR-{1 - stopped}"
    waits = f"rank {1 - stopped} of ACTOR waits in all_reduce"
    assert re.search(says(waits, f"for rank {stopped}", "without progress", "it was at"), hung[0].text)
    (restart,) = [event for event in events if isinstance(event, JobEvent) and event.kind == "restart"]
    assert waits in restart.text
    # The flight record of the rank that waited, for torch's own tools.
    assert list((tmp_path / "logs").glob(f"collectives_*_ACTOR_{1 - stopped}"))

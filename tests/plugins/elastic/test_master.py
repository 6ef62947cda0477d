"""Additional engines that die or cannot start do not end the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from core import JobBuilder, Role
from core.plan import ProcessPlan
from core.supervise.watch import WatchedProcess
from plugins.elastic.bring_up import calls_of_another
from plugins.elastic.master import ElasticMaster
from tests.plugins.elastic.job_roles import WITHIN_S, Settings

ROLES = "tests.plugins.elastic.job_roles"


def engine(rank: int) -> WatchedProcess:
    return WatchedProcess(ProcessPlan(cpu=1, workers=[("ROLLOUT", rank)], bundle=rank), expendable=True)


def test_an_engine_repeats_the_calls_of_an_engine_that_is_lost_in_their_order_and_before_its_own() -> None:
    first, added = engine(0), engine(1)
    first.lose("killed")
    role = Role.ROLLOUT
    first.calls = {
        (role, 0, "prepare"): (1, 8, b"p"),
        (role, 0, "receive_weights"): (1, 9, b"w"),
        (role, 0, "load"): (1, 4, b"m"),
    }
    added.calls = calls_of_another(added, [first, added])
    added.calls[role, 1, "receive_weights"] = (1, 0, b"newer")
    ordered = sorted(added.calls, key=added.calls.__getitem__)
    assert ordered == [(role, 1, "load"), (role, 1, "prepare"), (role, 1, "receive_weights")]
    # A third engine, if the first one has left the run.
    assert (role, 2, "load") in calls_of_another(engine(2), [added])


@pytest.mark.full
def test_a_run_goes_on_after_added_engines_die_or_fail_to_load_and_does_not_wait_for_one_that_loads(
    tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = JobBuilder().device_type("CPU").config(Settings(tmp_path))
    builder.role("trainer").run(f"{ROLES}:Trainer").resource(cpu=0.25)
    builder.role("actor").train(f"{ROLES}:Rank").total(1).resource(cpu=0.25)
    builder.role("rollout").run(f"{ROLES}:Engine").resource(cpu=0.25)
    job = builder.build()
    job.master = ElasticMaster
    result = job.submit("elastic", log_dir=tmp_path / "logs")
    assert (result.status, result.error) == ("finished", "")
    # The run did not wait for the engine that was loading its model at the end.
    assert result.elapsed < 10 * WITHIN_S
    output = capsys.readouterr().out
    assert "after the loss: [(0, 'model'), (1, 'model')]" in output
    assert "after the failure: 2 ROLLOUT-2 could not join: FileNotFoundError: model is not on this node" in output
    assert "at the end: [(0, 'model'), (1, 'model'), (2, 'model')]" in output

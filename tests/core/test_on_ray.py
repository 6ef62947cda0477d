"""On real Ray, each style of calls once: what a role group, a stub and a worker group do, and a death.

The other tests of core try all that calls mean in local mode, and with --full on Ray too.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import workers

from core import JobBuilder, JobEvent, RLJobBuilder, RoleGroup, WorkerGroup
from tests.processes import left_behind, wait_until_gone

GUARD_S = 300.0


def test_role_groups_of_two_ranks_go_on_after_a_kill_from_what_was_kept(
    ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"

    def script(trainer: Any) -> None:
        assert trainer.get_role_groups() == ["RG_ACTOR"]
        first, second = trainer.RG_ACTOR.identity()
        assert (first[:4], second[:4]) == (("ACTOR", 0, 2, 0), ("ACTOR", 1, 2, 1))
        begin = int(kept.read_text()) if kept.exists() else 0
        for step in range(begin, 3):
            assert trainer.RG_ACTOR.echo([step, -step]) == [(0, [step]), (1, [-step])]
            kept.write_text(str(step + 1))
            if (trainer.attempt, step) == (1, 1):
                trainer.RG_ACTOR.die(1)
        trainer.info(f"attempt {trainer.attempt} began at {begin}")

    events: list[Any] = []
    builder = RLJobBuilder().device_type("CPU").config(script).recovery(max_restarts=1)
    builder.trainer("workers.Script").resource(cpu=0.5)
    builder.actor("workers.Echo").nproc_per_node(2).resource(cpu=0.5)
    result = builder.build().submit("test", log_dir=tmp_path / "logs", observers=[events.append])
    assert (result.status, result.error, result.exit_code, result.attempt) == ("finished", "", 0, 2)
    assert "attempt 2 began at 2" in capsys.readouterr().out
    told = [(event.kind, event.text) for event in events if isinstance(event, JobEvent)]
    assert [kind for kind, _ in told] == ["start", "restart", "start", "end"]
    assert "ACTOR-1" in told[1][1]
    assert result.peak_memory_bytes > 10 * 2**20
    assert left_behind(result.run_id) == []
    # Of both attempts, three processes each.
    logs = [file.read_text() for file in (tmp_path / "logs").glob("*.log")]
    pids = [int(pid) for log in logs for pid in re.findall(r"process (\d+) ", log)]
    assert len(pids) == 6
    wait_until_gone(*pids, timeout_s=GUARD_S)


def test_stubs_call_the_workers_that_are_bound_to_them(ray_cluster: None) -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("actor").run("workers.Echo").total(2).resource(cpu=0.5)
    with builder.build().running("stubs"):
        assert workers.whole([1, 2]) == [[1, 2], [1, 2]]
        assert workers.first_only() == 10
        assert workers.doubled([1, 2, 3]).result() == [2, 4, 6]
        with pytest.raises(KeyError, match="lost in rank 1"):
            RoleGroup("actor").call("fail", 1).result()


def test_worker_groups_give_out_split_and_join(ray_cluster: None) -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("grid").run("workers.Grid").total(2).resource(cpu=0.5)
    with builder.build().running("grids"):
        grid = WorkerGroup("grid", workers.Grid)
        assert grid.everybody([1, 2]) == [(0, [1, 2]), (1, [1, 2])]
        assert grid.first(5) == (0, 5)
        assert grid.add(np.arange(3.0), np.arange(3.0)).tolist() == [0, 2, 4]
        assert grid.where([1, 2, 3]) == [(0, [1, 2]), (0, [1, 2]), (1, [3])]
        assert grid.later([1, 2]).result() == [2, 3]


def test_ranks_that_share_their_processes_with_others_call_them_and_each_its_own(ray_cluster: None) -> None:
    builder = JobBuilder().device_type("CPU")
    for role in ("upper", "lower"):
        builder.role(role).train("workers.Stacked").total(2).resource(cpu=0.5).process("both")
    builder.with_collocation("upper", "lower")
    with builder.build().running("stacked"):
        # Both ranks ask both ranks below at the same time, whose processes are their own.
        first, second = RoleGroup("upper").ask_all(["a", "b"])
        assert (first, second) == ([["LOWER-0: a"], ["LOWER-1: a"]], [["LOWER-0: b"], ["LOWER-1: b"]])
        assert RoleGroup("upper").ask_own() == [["LOWER-0"], ["LOWER-1"]]

"""Each style of calls once on real Ray: role group, stub and worker group, and a restart after a death.

The other tests of core cover the semantics of calls in local mode, and with --full also on Ray.
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


def test_a_job_of_two_ranks_continues_from_its_checkpoint_after_a_rank_is_killed(
    ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoint"

    def script(trainer: Any) -> None:
        assert trainer.get_role_groups() == ["RG_ACTOR"]
        first, second = trainer.RG_ACTOR.identity()
        assert (first[:4], second[:4]) == (("ACTOR", 0, 2, 0), ("ACTOR", 1, 2, 1))
        begin = int(checkpoint.read_text()) if checkpoint.exists() else 0
        for step in range(begin, 3):
            assert trainer.RG_ACTOR.echo([step, -step]) == [(0, [step]), (1, [-step])]
            checkpoint.write_text(str(step + 1))
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
    changes = [(event.kind, event.text) for event in events if isinstance(event, JobEvent)]
    assert [kind for kind, _ in changes] == ["start", "restart", "start", "end"]
    assert "ACTOR-1" in changes[1][1]
    assert result.peak_memory_bytes > 10 * 2**20
    assert left_behind(result.run_id) == []
    # Two attempts with three processes each.
    logs = [file.read_text() for file in (tmp_path / "logs").glob("*.log")]
    pids = [int(pid) for log in logs for pid in re.findall(r"process (\d+) ", log)]
    assert len(pids) == 6
    wait_until_gone(*pids, timeout_s=GUARD_S)


def test_stubs_call_the_methods_that_are_bound_to_them(ray_cluster: None) -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("actor").run("workers.Echo").total(2).resource(cpu=0.5)
    with builder.build().running("stubs"):
        assert workers.whole([1, 2]) == [[1, 2], [1, 2]]
        assert workers.first_only() == 10
        assert workers.doubled([1, 2, 3]).result() == [2, 4, 6]
        with pytest.raises(KeyError, match="lost in rank 1"):
            RoleGroup("actor").call("fail", 1).result()


def test_worker_groups_distribute_split_and_join(ray_cluster: None) -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("grid").run("workers.Grid").total(2).resource(cpu=0.5)
    with builder.build().running("grids"):
        grid = WorkerGroup("grid", workers.Grid)
        assert grid.everybody([1, 2]) == [(0, [1, 2]), (1, [1, 2])]
        assert grid.first(5) == (0, 5)
        assert grid.add(np.arange(3.0), np.arange(3.0)).tolist() == [0, 2, 4]
        assert grid.where([1, 2, 3]) == [(0, [1, 2]), (0, [1, 2]), (1, [3])]
        assert grid.later([1, 2]).result() == [2, 3]


def test_ranks_of_shared_processes_can_call_the_other_role_in_all_processes_and_in_their_own(
    ray_cluster: None,
) -> None:
    builder = JobBuilder().device_type("CPU")
    for role in ("upper", "lower"):
        builder.role(role).train("workers.Stacked").total(2).resource(cpu=0.5).process("both")
    builder.with_collocation("upper", "lower")
    with builder.build().running("stacked"):
        # Both ranks of UPPER call both ranks of LOWER at the same time, in the processes that they share with them.
        first, second = RoleGroup("upper").ask_all(["a", "b"])
        assert (first, second) == ([["LOWER-0: a"], ["LOWER-1: a"]], [["LOWER-0: b"], ["LOWER-1: b"]])
        assert RoleGroup("upper").ask_same_rank() == [["LOWER-0"], ["LOWER-1"]]

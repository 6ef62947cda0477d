"""Nodes that join a cluster get engines, and those that leave take none of the work with them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from recipe_runs import ROOT, Run
from test_elastic_runs import OPTIONS, REWARD

from plugins.elastic.requests import read_state

CLUSTER = """
import sys
from ray.cluster_utils import Cluster

node = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 4})
print(cluster.address, flush=True)
added = []
for line in sys.stdin:
    if line == "add\\n":
        added.append(cluster.add_node(**node, num_cpus=1))
    else:
        cluster.remove_node(added.pop(), allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""
WITHIN_S = 240.0


class SmallCluster:
    """A Ray cluster of one node, to which nodes are added."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._input = process.stdin
        self._output = process.stdout
        self.address = self._output.readline().strip()

    def ask(self, word: str) -> None:
        """Add a node of one core, or remove the last one as a power cut does."""
        print(word, file=self._input, flush=True)
        assert self._output.readline() == "done\n"


@contextmanager
def small_cluster() -> Iterator[SmallCluster]:
    """Start a cluster in a process of its own."""
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(command, text=True, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield SmallCluster(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def wait_for_engines(run: Run, names: list[str]) -> None:
    """Wait until exactly these engines run."""
    deadline = time.monotonic() + WITHIN_S
    while list(read_state(run.run_dir).engines) != names:
        assert run.process.poll() is None, run.process.communicate()
        assert time.monotonic() < deadline, read_state(run.run_dir)
        time.sleep(0.2)


@pytest.mark.nightly
def test_a_node_that_joins_gets_an_engine_and_its_work_is_done_by_others_when_it_leaves(
    policy: Path, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    source = tmp_path / "reward.py"
    source.write_text(REWARD.format(hold=str(hold)))
    chosen = [f"model.path={policy}", f"reward.source={source}:reward", *OPTIONS.split()]
    apart = ["placement.nodes=2", "placement.colocate=false", "placement.actor_nodes=1", "placement.actor_ranks=1"]
    with small_cluster() as cluster:
        run = Run("grpo", cluster.address, tmp_path / "run", *chosen, *apart, "placement.elastic=true")
        run.wait_until(lambda: len(run.metrics) >= 1)
        hold.touch()
        cluster.ask("add")
        wait_for_engines(run, ["ROLLOUT-0", "ROLLOUT-1", "ROLLOUT-2"])
        hold.unlink()
        steps = len(run.metrics)
        run.wait_until(lambda: len(run.metrics) >= steps + 2)
        cluster.ask("remove")
        run.wait()
        assert run.code == 0, run.err
        assert "ROLLOUT-2 has no node" in run.out
        fixed = Run("grpo", cluster.address, tmp_path / "fixed", *chosen, *apart).wait()
        assert fixed.code == 0, fixed.err
    weights = fixed.weights()
    assert run.weights().keys() == weights.keys()
    assert all(bool((run.weights()[name] == tensor).all()) for name, tensor in weights.items())

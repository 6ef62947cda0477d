"""Placement on a cluster of two nodes with four devices each. The nodes are real Ray nodes on this machine.

Each node has enough resources for all ranks of the jobs, so ranks on both nodes were spread on purpose.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
Placements = dict[str, list[Any]]
"""Job -> placement of each worker, as returned by workers.Where.place."""

SCRIPT = """
import json
import os
import signal
import sys
import time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from core import JobBuilder, JobError, RLJobBuilder, RoleGroup
from core.context import current

node = {"num_cpus": 8, "num_gpus": 12, "include_dashboard": False, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args=node)
cluster.add_node(**node)
ray.init(address=cluster.address, log_to_driver=False)
placements = {"nodes": [each["NodeID"] for each in ray.nodes()]}

builder = RLJobBuilder().device_type("GPU").node_num(2).device_per_node(2)
builder.actor("workers.Place").nnodes(2).nproc_per_node(2).resource(cpu=0.5, accelerator=1)
builder.rollout("workers.Place").total(4).resource(cpu=0.5, accelerator=1)
builder.with_collocation("actor", "rollout")
builder.role("plain").run("workers.Place").resource(cpu=0.5)
with builder.build().running("nodes"):
    placements["actor"] = RoleGroup("actor").call("place").result()
    placements["rollout"] = RoleGroup("rollout").call("place").result()
    placements["plain"] = RoleGroup("plain").call("place").result()
    placements["sums"] = RoleGroup("actor").call("sum_of_ranks").result()

builder = RLJobBuilder().device_type("GPU").device_per_node(11)
builder.actor("workers.Where").resource(cpu=0.5, accelerator=11)
builder.rollout("workers.Where").resource(cpu=0.5, accelerator=11)
builder.with_collocation("actor", "rollout")
with builder.build().running("eleven"):
    placements["eleven"] = RoleGroup("rollout").call("place").result()

builder = JobBuilder().device_type("CPU")
builder.role("apart").train("workers.Place").nnodes(2).nproc_per_node(2).resource(cpu=1)
with builder.build().running("apart"):
    placements["apart"] = RoleGroup("apart").call("place").result()

builder = JobBuilder().device_type("CPU")
builder.role("wide").train("workers.Place").nnodes(3).nproc_per_node(2).resource(cpu=1)
builder.recovery(placement_timeout=1)
try:
    with builder.build().running("wide"):
        pass
except JobError as error:
    placements["refused"] = [str(error)]

def lose_an_engine(trainer):
    places = {role: RoleGroup(role).call("place").result() for role in ("actor", "rollout", "reference")}
    lost = trainer.RG_ROLLOUT[1]
    os.kill(places["rollout"][1]["pid"], signal.SIGKILL)
    while current().directory.replacement(lost, 0.0) == lost:
        time.sleep(0.01)
    return places | {"replaced": RoleGroup("rollout").call("place").result()}

folder = Path(sys.argv[1])
builder = RLJobBuilder().device_type("GPU").node_num(2).device_per_node(4)
builder.config({"folder": folder, "script": lose_an_engine}).trainer("fragile.Script").resource(cpu=0.25)
builder.actor("workers.Where").nnodes(2).nproc_per_node(4).resource(cpu=0.25, accelerator=1)
builder.rollout("workers.Where").total(4).resource(cpu=0.25, accelerator=2)
builder.reference("workers.Where").total(8).resource(cpu=0.25, accelerator=1)
builder.with_collocation("actor", "rollout", "reference")
result = builder.build().submit("engines", log_dir=folder / "logs")
placements["engines"] = [result.status, result.error, eval((folder / "result").read_text())]
print(json.dumps(placements))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def placements(tmp_path_factory: pytest.TempPathFactory) -> Placements:
    """Run the jobs, and return the placement of their workers."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("engines"))],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_collocated_roles_share_each_device_rank_by_rank_and_see_only_that_device(placements: Placements) -> None:
    seen = [(place["node"], place["devices"]) for place in placements["actor"]]
    assert [(place["node"], place["devices"]) for place in placements["rollout"]] == seen
    assert sorted(seen) == sorted((node, device) for node in placements["nodes"] for device in "01")


def test_an_engine_of_two_devices_and_its_replacement_see_the_devices_of_two_ranks_of_their_node(
    placements: Placements,
) -> None:
    status, error, places = placements["engines"]
    assert (status, error) == ("finished", "")
    ranks = [(place["node"], place["devices"]) for place in places["actor"]]
    # Each rank has its own device, four on each node.
    assert sorted(ranks) == sorted((node, device) for node in placements["nodes"] for device in "0123")
    assert [(place["node"], place["devices"]) for place in places["reference"]] == ranks
    for engines in (places["rollout"], places["replaced"]):
        for i, engine in enumerate(engines):
            pair = ranks[2 * i : 2 * i + 2]
            assert [(engine["node"], device) for device in sorted(engine["devices"].split(","))] == pair
    assert places["rollout"][1]["pid"] != places["replaced"][1]["pid"]


def test_devices_that_another_role_has_reserved_are_shown_in_the_order_of_their_numbers(placements: Placements) -> None:
    # Sorted as text, 10 would come after 1, and a rank would get the device of another one.
    assert [place["devices"] for place in placements["eleven"]] == ["0,1,2,3,4,5,6,7,8,9,10"]


def test_ranks_with_nnodes_2_are_on_two_machines_even_if_one_has_room_for_all(placements: Placements) -> None:
    assert [place["node"] for place in placements["actor"]] == [placements["actor"][i]["node"] for i in (0, 0, 2, 2)]
    assert len({place["node"] for place in placements["apart"]}) == 2


def test_a_role_with_more_nodes_than_the_cluster_raises_an_error_with_both_numbers(placements: Placements) -> None:
    (message,) = placements["refused"]
    assert re.search(says("WIDE", "3 machines", "2 CPU", "has 2"), message)


def test_local_ranks_count_within_a_node(placements: Placements) -> None:
    for role in ("actor", "apart"):
        for node in placements["nodes"]:
            places = [place for place in placements[role] if place["node"] == node]
            assert [place["local_rank"] for place in places] == [0, 1], role
            assert {place["local_world_size"] for place in places} == {2}


def test_ranks_on_different_nodes_share_one_rendezvous_address(placements: Placements) -> None:
    assert placements["sums"] == [0 + 1 + 2 + 3] * 4
    assert len({place["master"] for place in placements["actor"]}) == 1


def test_a_worker_without_devices_sees_none(placements: Placements) -> None:
    assert [place["devices"] for place in placements["plain"]] == [""]

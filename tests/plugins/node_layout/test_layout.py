"""Layout of a job on its nodes."""

import pytest

from core import Job, RLJobBuilder
from plugins.assumed_machines.machines import Machines, assuming
from plugins.node_layout.layout import node_lines, nodes_of
from tests.messages import says


def spread(*roles: tuple[str, int, int, float], nodes: int = 2, collocated: tuple[str, ...] = ()) -> Job:
    """Return a job of (role, nodes, workers per node, devices per worker) on nodes with eight devices."""
    builder = RLJobBuilder().device_type("GPU").node_num(nodes).device_per_node(8)
    builder.actor("builtins:object")
    for name, count, each, devices in roles:
        if name != "actor":
            builder.role(name).train("builtins:object")
        builder.nnodes(count).nproc_per_node(each).resource(accelerator=devices)
    if collocated:
        builder.with_collocation(*collocated)
    return builder.build()


def test_a_spread_role_has_one_part_per_node() -> None:
    job = spread(("actor", 2, 4, 1), ("critic", 1, 4, 1))
    # Four of the actor's eight ranks are on each node. The critic's ranks are on the first node with room.
    assert nodes_of(job) == [0, 1, 0]
    assert node_lines(job, nodes_of(job)) == [
        "node 1: actor 0-3, critic 0-3; 8 of 8 GPUs",
        "node 2: actor 4-7; 4 of 8 GPUs",
    ]


def test_roles_that_share_gpus_are_on_the_same_node_rank_by_rank() -> None:
    job = spread(("actor", 2, 8, 1), ("rollout", 1, 16, 1), collocated=("actor", "rollout"))
    assert node_lines(job, nodes_of(job)) == [
        "node 1: actor 0-7, rollout 0-7; 8 of 8 GPUs",
        "node 2: actor 8-15, rollout 8-15; 8 of 8 GPUs",
    ]


def test_large_roles_are_placed_before_small_ones() -> None:
    # In this order, the ranks of the first role would take a device of each node.
    job = spread(("actor", 1, 4, 1), ("critic", 1, 8, 1), ("reward", 1, 4, 1))
    assert nodes_of(job) == [1, 0, 1]


def test_a_role_that_fits_on_no_node_is_refused_even_if_the_total_suffices() -> None:
    # 2 x 3 + 2 x 5 = 16 fit on 2 x 8; 6 + 6 + 4 = 16 do not.
    assert nodes_of(spread(("actor", 2, 3, 1), ("critic", 2, 5, 1))) == [0, 1, 0, 1]
    with pytest.raises(ValueError, match=says("REWARD", "4 devices", "8 each", "2, 2")):
        nodes_of(spread(("actor", 1, 6, 1), ("critic", 1, 6, 1), ("reward", 1, 4, 1)))


def test_a_role_on_too_many_nodes_is_refused_by_name() -> None:
    machines = assuming(Machines(8, 2, 80 * 10**9))
    with machines, pytest.raises(ValueError, match=says("CRITIC", "3 nodes", "2 nodes")):
        nodes_of(spread(("actor", 1, 1, 1), ("critic", 3, 1, 1), nodes=3))

"""One Ray cluster and one running group of workers for all tests of core that only call."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core import JobBuilder, RoleGroup

sys.path.insert(0, str(Path(__file__).parent))  # so that workers can import `workers`, as a user's module


@pytest.fixture(scope="module")
def three_workers(ray_cluster: None) -> Iterator[None]:
    """ACTOR: three independent echoes. CRITIC: two ranks that rendezvous. SOLO: one."""
    builder = JobBuilder().device_type("CPU").config({"answer": 42}).global_env({"COLOUR": "red"})
    builder.role("actor").run("workers.Echo").total(3).resource(cpu=0.5)
    builder.role("critic").train("workers.Echo").nproc_per_node(2).resource(cpu=0.5).env({"COLOUR": "blue"})
    builder.role("solo").run("workers.Echo").resource(cpu=0.5)
    with builder.build().running("echoes"):
        yield


@pytest.fixture
def actors(three_workers: None) -> RoleGroup:
    """The three echoes."""
    return RoleGroup("ACTOR")


@pytest.fixture
def ranks(three_workers: None) -> RoleGroup:
    """The two ranks of a train role."""
    return RoleGroup("CRITIC")


@pytest.fixture
def solo(three_workers: None) -> RoleGroup:
    """The one worker."""
    return RoleGroup("SOLO")

"""Fixtures: one running group of workers per backend, shared by all tests of core that only call them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core import JobBuilder, RoleGroup
from core.backends import BackendName

sys.path.insert(0, str(Path(__file__).parent))  # lets worker processes import `workers`, as a user's module

from groups import RAY


@pytest.fixture(scope="module", params=[RAY, "local"])
def backend(request: pytest.FixtureRequest) -> BackendName:
    """Backend of the workers. Calls have the same semantics on both."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.fixture(scope="module")
def echoes(backend: BackendName) -> Iterator[None]:
    """Start ACTOR, SOLO and TWO (3, 1 and 2 instances of Echo), and CRITIC (ranks of Echo, two on Ray)."""
    builder = JobBuilder().device_type("CPU").config({"answer": 42}).global_env({"COLOUR": "red", "TROUPE_CORES": "7"})
    for role, count in (("actor", 3), ("solo", 1), ("two", 2)):
        threads = {"solo": 2, "two": -3}.get(role, 0)
        builder.role(role).run("workers.Echo").total(count).resource(cpu=0.5, threads=threads)
    builder.concurrency(1).role("critic").train("workers.Echo").resource(cpu=0.5).env({"COLOUR": "blue"})
    builder.nproc_per_node({"ray": 2, "local": 1}[backend])
    builder.role("both_a").run("workers.Echo").resource(cpu=0.5).process("shared")
    builder.role("both_b").run("workers.Echo").resource(cpu=0.5).process("shared")
    builder.with_collocation("both_a", "both_b")
    builder.role("crowd").run("workers.Echo").resource(cpu=0.5).concurrency(8)
    with builder.build().running("echoes", backend=backend):
        yield


@pytest.fixture
def gate(backend: BackendName, tmp_path: Path) -> Path:
    """Path of a file for which `Echo.held` waits. In local mode calls block the caller, so the file exists already."""
    gate = tmp_path / "gate"
    if backend == "local":
        gate.touch()
    return gate


@pytest.fixture
def actors(echoes: None) -> RoleGroup[Any]:
    """Group of three instances."""
    return RoleGroup("ACTOR")


@pytest.fixture
def ranks(echoes: None) -> RoleGroup[Any]:
    """Group of the ranks of a train role."""
    return RoleGroup("CRITIC")


@pytest.fixture
def solo(echoes: None) -> RoleGroup[Any]:
    """Group of one instance."""
    return RoleGroup("SOLO")

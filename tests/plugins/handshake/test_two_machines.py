"""The handshake between two machines, which are network namespaces. A routing rule drops packets as a firewall does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.messages import says
from tests.two_machines import LIMIT_S, Laboratory, Machine, laboratory, run

pytestmark = [pytest.mark.nightly, pytest.mark.namespaces]

PORT = "29511"
EPHEMERAL = "30000-65000"
HANDSHAKE_S = 3
NBYTES = 64 * 2**20


@pytest.fixture(scope="module")
def machines() -> Iterator[Laboratory]:
    with laboratory(2, has_ray=False) as made:
        yield made


@contextmanager
def blocked(machine: Machine, ports: str) -> Iterator[None]:
    """Drop the packets that a machine sends from these ports. Nobody gets an answer from them."""
    rule = ["blackhole", "ipproto", "tcp", "sport", ports]
    path = {"PATH": os.environ["PATH"]}
    run(machine.within(["ip", "rule", "add", *rule], path))
    try:
        yield
    finally:
        run(machine.within(["ip", "rule", "del", *rule], path))


def start(machines: Laboratory, machine: Machine, *arguments: object, rank: int = 0) -> subprocess.Popen[str]:
    """Start `rank.py` on a machine."""
    env = machines.env | {"MASTER_ADDR": machines.near.ip, "MASTER_PORT": PORT, "WORLD_SIZE": "2", "RANK": str(rank)}
    env |= {"NBYTES": str(NBYTES), "GLOO_SOCKET_IFNAME": "eth0"}
    command = [sys.executable, "-m", "tests.plugins.handshake.rank", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(machine.within(command, env), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def meet(machines: Laboratory) -> str:
    """Let a rank on each machine create a group. Return the output of rank 1."""
    rank_0 = start(machines, machines.near, "group", HANDSHAKE_S)
    rank_1 = start(machines, machines.far, "group", HANDSHAKE_S, rank=1)
    try:
        return rank_1.communicate(timeout=LIMIT_S)[0]
    finally:
        rank_0.kill()
        rank_0.communicate()


def read_weights(machines: Laboratory, ports: str = "") -> str:
    """Let a process on the second machine read bytes from the first, whose ports may be blocked. Return its output."""
    source = start(machines, machines.near, "serve", HANDSHAKE_S, machines.near.ip)
    try:
        assert source.stdout is not None
        address = source.stdout.readline().split()
        reader = start(machines, machines.far, "fetch", HANDSHAKE_S, *address)
        if not ports:
            return reader.communicate(timeout=LIMIT_S)[0]
        with blocked(machines.near, ports):
            return reader.communicate(timeout=LIMIT_S)[0]
    finally:
        source.kill()
        source.communicate()


def test_two_machines_exchange_a_kilobyte_and_64_megabytes_in_seconds(machines: Laboratory) -> None:
    output = meet(machines)
    (seconds,) = re.findall(r"result ([\d.]+)", output)
    assert float(seconds) < HANDSHAKE_S
    assert read_weights(machines).strip() == "result"


def test_a_blocked_rendezvous_is_named_with_both_ends_within_the_limit(machines: Laboratory) -> None:
    with blocked(machines.near, PORT):
        output = meet(machines)
    ends = ("ACTOR-1 (far, 10.77.0.2 on eth0)", f"ACTOR-0 at 10.77.0.1:{PORT}", "no response within 3 s")
    assert re.search(says("rendezvous of ACTOR", *ends, "placement.interface"), output)
    (seconds,) = re.findall(r"([\d.]+) s: handshake", output)
    assert float(seconds) < HANDSHAKE_S + 2


def test_blocked_collectives_are_named_with_both_ends_within_the_limit(machines: Laboratory) -> None:
    with blocked(machines.near, EPHEMERAL):
        output = meet(machines)
    assert re.search(says("collectives of ACTOR", "ACTOR-1 (far, 10.77.0.2 on eth0)", "10.77.0.1"), output)
    (seconds,) = re.findall(r"([\d.]+) s: handshake", output)
    assert float(seconds) < HANDSHAKE_S + 2


def test_a_blocked_server_of_weights_is_reported_within_the_limit(machines: Laboratory) -> None:
    output = read_weights(machines, EPHEMERAL)
    assert f"no response within {HANDSHAKE_S} s" in output

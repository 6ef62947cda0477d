"""The network interface of a worker, by default that of Ray's address."""

from __future__ import annotations

import os
import re
import socket
from typing import NamedTuple

import psutil
import pytest
import ray

from plugins.environment.interface import node_address
from tests.messages import says


class Address(NamedTuple):
    """Address of an interface, as psutil lists it."""

    family: socket.AddressFamily
    address: str


VARIABLES = ("TROUPE_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set and remove the variables, so that their values are restored after the test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def address_of(ray_address: str) -> str:
    """Return the address of a worker on a node that Ray reaches at `ray_address`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray.util, "get_node_ip_address", lambda: ray_address)
        return node_address()


def chosen() -> list[str | None]:
    return [os.environ.get(name) for name in VARIABLES[1:]]


def test_interface_that_is_named_gives_the_address_and_is_used_by_gloo_and_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TROUPE_INTERFACE", "lo")
    assert address_of("192.0.2.77") == "127.0.0.1"
    assert chosen() == ["lo", "=lo"]


def test_interface_of_the_address_of_ray_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {
        "lo": [Address(socket.AF_INET, "127.0.0.1")],
        "eth0": [Address(socket.AF_INET, "192.0.2.1")],
        "ib0": [
            Address(socket.AF_INET6, "fe80::1%ib0"),
            Address(socket.AF_INET6, "fd00::7"),
        ],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listed)
    assert address_of("192.0.2.1") == "192.0.2.1"
    assert chosen() == ["eth0", "=eth0"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "theirs")
    monkeypatch.setenv("TROUPE_INTERFACE", "ib0")
    assert address_of("192.0.2.1") == "fd00::7"
    assert chosen()[0] == "theirs"


def test_loopback_address_and_unknown_address_change_nothing() -> None:
    assert address_of("127.0.0.1") == "127.0.0.1"
    assert address_of("203.0.113.9") == "203.0.113.9"
    assert chosen() == [None, None]


def test_unknown_interface_raises_an_error_with_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_INTERFACE", "eth7")
    with pytest.raises(ValueError, match=says("eth7", "placement.interface", "127.0.0.1")) as caught:
        address_of("192.0.2.1")
    assert re.search("'lo'", str(caught.value))

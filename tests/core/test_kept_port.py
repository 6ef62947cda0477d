"""The port at which the ranks of a role will meet."""

import socket
from pathlib import Path

import pytest

from core.backends.ray_host import kept_port


def test_nobody_is_given_a_kept_port_by_chance_or_by_name() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with kept_port("127.0.0.1") as one, kept_port("127.0.0.1") as other:
        ports = [kept.getsockname()[1] for kept in (one, other)]
        assert max(ports) < lowest
        assert ports[0] != ports[1]
        with socket.socket() as late, pytest.raises(OSError, match="in use"):
            late.bind(("127.0.0.1", ports[0]))
    with socket.socket() as torch:  # at once, once it is let go of
        torch.bind(("127.0.0.1", ports[0]))
        torch.listen()


def test_no_port_is_kept_at_an_address_that_is_not_here() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        kept_port("192.0.2.1")

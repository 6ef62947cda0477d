"""Listening socket of a server that other machines reach."""

from __future__ import annotations

import socket


def listen_at(host: str) -> socket.socket:
    """Return a listening socket on a free port of one address of this machine.

    Args:
        host: IPv4 or IPv6 address, or a host name. Only this address is bound.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family)

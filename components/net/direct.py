"""Connections to the loopback addresses without the proxy that the environment sets."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from components.net.loopback import loopback_variables


def is_loopback(host: str) -> bool:
    """Return True for a host name or address of this machine's loopback interface."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(name))  # short forms, such as 127.1
        except OSError:
            return False
    # ::ffff:127.0.0.1 is the IPv4 loopback; connections to 0.0.0.0 reach this machine too.
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


@contextmanager
def direct_loopback() -> Iterator[None]:
    """Context in which all HTTP clients of this process reach the loopback addresses without a proxy."""
    variables = loopback_variables()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""Loopback addresses, which must be reached without the proxy that the environment sets.

A proxy usually runs on another machine, and would connect to 127.0.0.1 on that machine.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
"""Entries of `no_proxy` that common HTTP clients understand."""


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


def loopback_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `no_proxy` and `NO_PROXY` with the loopback addresses added. Empty if the environment sets no proxy."""
    names = {name.lower() for name, value in environment.items() if value}
    if not any(name.endswith("_proxy") and name != "no_proxy" for name in names):
        return {}
    entries: list[str] = []
    # Libraries read one of the two spellings, so both get the entries of both.
    for name in ("no_proxy", "NO_PROXY"):
        entries += environment.get(name, "").split(",")
    entries = [entry.strip() for entry in entries if entry.strip()]
    excluded = ",".join(dict.fromkeys([*entries, *LOOPBACK_NAMES]))
    return {"no_proxy": excluded, "NO_PROXY": excluded}


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

"""Loopback addresses, which are reached directly whatever proxy the environment names for all others.

A proxy is another machine in general: it would look for 127.0.0.1 on itself.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
"""Entries of `no_proxy` that the usual HTTP clients understand."""


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
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def loopback_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `no_proxy` and `NO_PROXY` with the loopback added; nothing where the environment names no proxy."""
    names = {name.lower() for name, value in environment.items() if value}
    if not any(name.endswith("_proxy") and name != "no_proxy" for name in names):
        return {}
    entries = [
        entry.strip()
        for name in ("no_proxy", "NO_PROXY")
        for entry in environment.get(name, "").split(",")
        if entry.strip()
    ]
    excluded = ",".join(dict.fromkeys([*entries, *LOOPBACK_NAMES]))
    return {"no_proxy": excluded, "NO_PROXY": excluded}


@contextmanager
def direct_loopback() -> Iterator[None]:
    """Let clients of any library in this process reach the loopback directly until the end of the block."""
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

"""Loopback addresses, which must be reached without the proxy that the environment sets.

A proxy usually runs on another machine, and would connect to 127.0.0.1 on that machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
"""Entries of `no_proxy` that common HTTP clients understand."""


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

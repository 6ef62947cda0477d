"""The machines that a run is planned for: this machine, or those of the option `assume_devices`."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import Any

assumed_machines: ContextVar[Any] = ContextVar("assumed_machines", default=None)
"""Machines of `assume_devices`, as the plug-in `assumed_machines` describes them, or None."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or the plural: `1 node`, `2 nodes`."""
    return f"{number} {noun}" if number <= 1 else f"{number} {noun}s"


def assumed() -> Any:
    """Return the assumed machines, or None if the run is planned for this machine."""
    return assumed_machines.get()


def is_this_machine() -> bool:
    """True if the run is planned for this machine, so that its cores, memory and packages count."""
    # With RAY_ADDRESS the processes start on the machines of a cluster, of which this one may be no part.
    return assumed() is None and not os.environ.get("RAY_ADDRESS")


def cores_here() -> int | None:
    """Return the number of CPU cores that the run may use, or None if it runs on other machines."""
    return len(os.sched_getaffinity(0)) if is_this_machine() else None

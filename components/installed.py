"""Packages of the machines that a run is planned for. Nothing here needs torch."""

from __future__ import annotations

import importlib.util
from contextvars import ContextVar

is_elsewhere: ContextVar[bool] = ContextVar("is_elsewhere", default=False)
"""True while choices are made for another machine, on which packages may be installed that are missing here."""


def is_available(package: str) -> bool:
    """Return True if a package can be imported, or may be on the machines of the plan."""
    return is_elsewhere.get() or importlib.util.find_spec(package) is not None

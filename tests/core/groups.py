"""Helpers shared by the tests of calls."""

from typing import Any

import pytest

from core import RoleGroup

RAY = pytest.param("ray", marks=pytest.mark.full)
"""The Ray backend in the full tier. Calls have the same semantics on both backends, and test_on_ray.py tries each style
of calls in the default tier."""
ON_RAY = pytest.mark.parametrize("backend", [RAY], indirect=True)
"""Mark of tests that need several processes: collectives, concurrency, deaths."""


def group_of(count: int) -> RoleGroup[Any]:
    """Return the group with `count` instances."""
    return RoleGroup({1: "solo", 2: "two", 3: "actor"}[count])

"""What the tests of calls share beside their fixtures."""

from typing import Any

import pytest

from core import RoleGroup

RAY = pytest.param("ray", marks=pytest.mark.full)
"""Calls mean the same everywhere; test_on_ray.py tries each style of them in the default tier."""
ON_RAY = pytest.mark.parametrize("backend", [RAY], indirect=True)
"""For what needs several processes: ranks that meet, things that happen at the same time, deaths."""


def group_of(count: int) -> RoleGroup[Any]:
    """The echoes that are so many."""
    return RoleGroup({1: "solo", 2: "two", 3: "actor"}[count])

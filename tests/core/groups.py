"""What the tests of calls share beside their fixtures."""

import pytest

from core import RoleGroup

ON_RAY = pytest.mark.parametrize("backend", ["ray"], indirect=True)
"""For what needs several processes: ranks that meet, things that happen at the same time, deaths."""


def group_of(count: int) -> RoleGroup:
    """The echoes that are so many."""
    return RoleGroup({1: "solo", 2: "two", 3: "actor", 5: "five"}[count])

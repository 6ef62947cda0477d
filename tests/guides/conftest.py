"""Makes the programs of the guides importable, like modules in a user's folder."""

import sys
from pathlib import Path

import pytest

from core.backends import BackendName

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=[pytest.param("ray", marks=pytest.mark.full), "local"])
def backend(request: pytest.FixtureRequest) -> BackendName:
    """Each program runs on Ray and in one process."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param

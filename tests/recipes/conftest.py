"""One Ray cluster and one short warm start for all recipe tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for recipe_runs


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen a few demonstrations: enough to answer in letters."""
    from components.warm_start import WarmStartSettings, ensure_warm_start

    return ensure_warm_start(WarmStartSettings(steps=40, batch_size=64), tmp_path_factory.mktemp("cache"))

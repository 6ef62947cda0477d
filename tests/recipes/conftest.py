"""Short warm starts for all recipe tests, created once for all processes of pytest."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for recipe_runs


@pytest.fixture(scope="session")
def warm_starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the cached warm starts. pytest-xdist gives each of its processes a folder below that of the session."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return folder / "warm_starts"


@pytest.fixture(scope="session")
def policy(warm_starts: Path) -> Path:
    """A model trained on a few demonstrations, enough to answer with letters."""
    return warm_start("sort", 40, warm_starts)


@pytest.fixture(scope="session")
def runner(warm_starts: Path) -> Path:
    """A model trained on a few games: it guesses numbers, and four in ten guesses bisect the remaining range."""
    return warm_start("guess", 60, warm_starts)


def warm_start(task: str, steps: int, folder: Path) -> Path:
    """Created in this process, which already has the imports. Of several processes one creates it."""
    from local_runs import kept_environment

    from plugins.demo.warm_start import WarmStartSettings, make_warm_start

    with kept_environment():
        os.environ["TROUPE_CACHE"] = str(folder)
        return make_warm_start(WarmStartSettings(task=task, steps=steps, batch_size=64))

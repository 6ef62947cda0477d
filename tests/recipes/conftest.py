"""One Ray cluster and one short warm start for all recipe tests."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for recipe_runs


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A local Ray that every run of these tests joins, instead of starting one of its own."""
    import ray

    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=300 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen a few demonstrations: enough to answer in letters."""
    from components.warm_start import WarmStartSettings, ensure_warm_start

    return ensure_warm_start(WarmStartSettings(steps=40, batch_size=64), tmp_path_factory.mktemp("cache"))

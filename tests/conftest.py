"""Setup of all tests: one thread, a private Ray, no network, and a budget of CPU seconds."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugins.sandbox.sandbox import PERMISSION
from tests.two_machines import namespaces_refused

pytest_plugins = ["tests.cpu_budget"]

TESTS = Path(__file__).resolve().parent
FIRST = (
    "recipes/test_role_group_runs.py",
    "core/test_recovery.py",
    "core/test_two_machines.py",
    "recipes/test_resume.py",
    "recipes/test_verl_ppo.py",
    "recipes/test_agent_runs.py",
    "test_cluster.py",
    "recipes/test_openrlhf_ppo.py",
    "recipes/test_reward_outage.py",
    "components/weights/test_weights_arrive.py",
)
"""The slowest files, the slowest first, so that all pytest processes end at about the same time."""

# Set before any import of torch or ray, which read them once. Processes started by tests inherit them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TROUPE_CORES"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# The default of Ray is 15, with which other processes on the machine would slow its workers down. noqa: SIM112 - its
# name
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Every Ray cluster of the session accepts only calls with this token.
    _private = Path(tempfile.mkdtemp(prefix="troupe-tests-"))
    atexit.register(shutil.rmtree, _private, ignore_errors=True)
    with os.fdopen(os.open(_private / "ray_token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as _file:
        _file.write(secrets.token_hex(32))
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(_private / "ray_token")
    if namespaces_refused():
        # The tests' own processes use it, too.
        os.environ[PERMISSION] = "unsafe"
# By default Ray starts a worker per logical CPU in advance.
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 - Ray reads it in this spelling
os.environ["HF_HUB_OFFLINE"] = "1"
# Path of this checkout, also for processes in other folders and if another checkout is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH")]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that this system does not support, and run the slowest files first."""
    out = [item for item in items if item.get_closest_marker("namespaces")]
    if out and namespaces_refused():
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        return FIRST.index(name) if name in FIRST else len(FIRST)

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report deselected tests: a full tier without them is not complete."""
    is_full = "not full" not in str(config.getoption("markexpr"))
    if is_full and (reason := namespaces_refused()):
        terminalreporter.section("left out: tests of several machines", yellow=True)
        terminalreporter.write_line(reason, yellow=True)


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Address of the local Ray that all tests of a process share, because a start takes 5 s.

    It has more logical CPUs than the machine has cores, because most processes of the tests wait most of the time.
    """
    import ray

    from core.backends.ray import few_processes

    with few_processes():
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
def ray_cluster(ray_address: str) -> None:
    """The shared local Ray for tests that do not need its address."""

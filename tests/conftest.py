"""What holds for every test: one thread, throw-away Ray clusters, no network, and a time budget per folder."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
TOP_LEVEL = "(top level)"

FOLDER_BUDGET_S: dict[str, float] = {
    "core": 500,
    "components": 1200,
    "agents": 240,
    "recipes": 3000,
    "contracts": 120,
    TOP_LEVEL: 800,
}
"""Seconds that the tests of a folder of tests/ may take together, on two cores. Tests marked slow do not count."""

# Before anything imports torch or ray: both read these once. Processes that a test starts inherit them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A cluster lives as long as its test, on this machine; nothing outside reaches it and nothing is reported home.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Ray would start a worker for each logical CPU, wanted or not.
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 - Ray reads it in this spelling
os.environ["HF_HUB_OFFLINE"] = "1"
# This checkout, also in processes that start elsewhere and where another one is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH")]))


class FolderBudgets:
    """Adds up what the tests of each folder take, and fails the session when a folder goes over its budget."""

    def __init__(self, root: Path, budget_s: dict[str, float]) -> None:
        self.root = root
        self.budget_s = budget_s
        self.spent_s: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count set-up, call and tear-down; a shared fixture is charged to the folder that asks first."""
        path = self.root / report.nodeid.partition("::")[0]
        if "slow" in report.keywords or not path.is_relative_to(TESTS):
            return
        parts = path.relative_to(TESTS).parts
        self.spent_s[parts[0] if len(parts) > 1 else TOP_LEVEL] += report.duration

    def faults(self) -> list[str]:
        """One line for each folder that took too long or has no budget."""
        lines = []
        for folder, spent_s in sorted(self.spent_s.items()):
            if folder not in self.budget_s:
                lines.append(f"tests/{folder} has no budget; give it one in FOLDER_BUDGET_S of tests/conftest.py")
            elif spent_s > self.budget_s[folder]:
                lines.append(
                    f"tests/{folder} took {spent_s:.1f} s, over its budget of {self.budget_s[folder]:g} s; make its "
                    "tests faster (pytest --durations=10), or mark one slow that has to be"
                )
        return lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.faults() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.spent_s:
            spent = ", ".join(f"{folder} {spent_s:.1f} s" for folder, spent_s in sorted(self.spent_s.items()))
            terminalreporter.write_line(f"time per folder: {spent}")
        if faults := self.faults():
            terminalreporter.section("over budget", red=True, bold=True)
            for line in faults:
                terminalreporter.write_line(line, red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Start counting."""
    config.pluginmanager.register(FolderBudgets(config.rootpath, FOLDER_BUDGET_S))


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The one local Ray of a session, for every test that may share it: a process has one, and a start costs 5 s.

    It has more logical CPUs than the machine has cores: most of what the tests start waits most of the time.
    """
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
def ray_cluster(ray_address: str) -> None:
    """The same, for tests that need no address."""

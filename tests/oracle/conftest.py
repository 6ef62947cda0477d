"""Collects the rows of docs/differences.md over all tests."""

import os

import pytest
from differences import Differences

FOUND = Differences()


@pytest.fixture(scope="session")
def differences() -> Differences:
    return FOUND


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if os.environ.get("ORACLE_WRITE") == "1" and exitstatus == 0:
        FOUND.write()

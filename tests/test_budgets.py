"""The time budgets of tests/conftest.py, tried on small suites in processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).with_name("conftest.py")
SLEEPS = "import time\ndef test_sleeps():\n    time.sleep(1.2)\n"
SLOW = "import pytest, time\n@pytest.mark.slow\ndef test_sleeps():\n    time.sleep(1.2)\n"
FAST = "def test_does_nothing():\n    pass\n"


def run_suite(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the files as a suite in which tests/core and the top level may take 1 s each."""
    tests = folder / "tests"
    tests.mkdir()
    table = '\nFOLDER_BUDGET_S.clear()\nFOLDER_BUDGET_S.update({"core": 1.0, TOP_LEVEL: 1.0})\n'
    (tests / "conftest.py").write_text(CONFTEST.read_text() + table)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: counts for nothing\n")
    for name, text in files.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_folder_over_its_budget_or_without_one_fails_a_session_whose_tests_all_pass(tmp_path: Path) -> None:
    result = run_suite(tmp_path, {"core/test_a.py": SLEEPS, "new/test_b.py": FAST, "test_c.py": FAST})
    assert result.returncode == 1
    assert re.search(r"tests/core took \d+\.\d s, over its budget of 1 s", result.stdout)
    assert "tests/new has no budget" in result.stdout
    assert "tests/(top level) took" not in result.stdout
    assert "3 passed" in result.stdout.splitlines()[-1]


def test_slow_tests_do_not_count_and_the_top_level_does(tmp_path: Path) -> None:
    result = run_suite(tmp_path, {"core/test_a.py": SLOW, "core/test_b.py": FAST, "test_c.py": SLEEPS})
    assert result.returncode == 1
    assert re.search(r"tests/\(top level\) took \d+\.\d s, over its budget", result.stdout)
    assert "tests/core took" not in result.stdout


def test_a_suite_within_its_budgets_passes(tmp_path: Path) -> None:
    assert run_suite(tmp_path, {"core/test_a.py": SLOW, "test_b.py": FAST}).returncode == 0

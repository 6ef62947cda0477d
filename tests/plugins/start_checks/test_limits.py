"""Limits of the shell and of the machine end a run before it starts, with one line and exit code 2."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.messages import says

ROOT = Path(__file__).resolve().parents[3]
CHECK = "from plugins.start_checks.limits import check_{}; check_{}({})"


def python(limit: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python after a command of the shell, such as one that sets a limit."""
    command = ["bash", "-c", f'{limit} && exec "$@"', "bash", sys.executable, "-P", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def as_nobody(limit: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code as a user without privileges, for whom the kernel enforces limits. `os` is imported."""
    drop = "import os, resource; from plugins.start_checks import limits; "
    if os.getuid() == 0:
        drop += "os.setgroups([]); os.setuid(65534); "
    return python("true", "-c", f"{drop}{limit}; {code}")


def test_a_shell_with_few_open_files_is_refused_with_the_number_that_ray_needs(tmp_path: Path) -> None:
    done = python("ulimit -n 64", "-m", "recipes.grpo.main", f"run_dir={tmp_path}/run", "backend=ray")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    # Trainer, one rank and one engine: 192 + 3 x 16.
    assert re.search(says("64", "ulimit -n 240", "backend=local"), last)
    assert not (tmp_path / "run").exists()


def test_as_many_open_files_as_ray_needs_are_enough() -> None:
    assert python("ulimit -n 240", "-c", CHECK.format(*["open_files"] * 2, 3)).returncode == 0
    assert python("ulimit -n 239", "-c", CHECK.format(*["open_files"] * 2, 3)).returncode == 1


def test_a_user_with_few_processes_is_refused_with_the_number_that_is_needed() -> None:
    limit = "resource.setrlimit(resource.RLIMIT_NPROC, (50, 50))"
    done = as_nobody(limit, "limits.check_threads(60)")
    assert re.search(says("ValueError", "50 processes", "60 more", "ulimit -u"), done.stderr)


def test_a_user_with_enough_processes_is_not_refused() -> None:
    limit = "resource.setrlimit(resource.RLIMIT_NPROC, (4000, 4000))"
    done = as_nobody(limit, "limits.check_threads(60)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("assignment", "remedy"),
    [
        ("limits.SHARED_MEMORY = limits.Path('/proc')", "--shm-size"),
        ("limits.tempfile.tempdir = '/proc'", "TMPDIR"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_refused_with_its_name(assignment: str, remedy: str) -> None:
    # Not even root can create files in /proc.
    code = f"from plugins.start_checks import limits; {assignment}; limits.check_machine('local', 1)"
    done = python("true", "-c", code)
    assert re.search(says("ValueError", "/proc", "cannot be written to", remedy), done.stderr)


def test_an_unwritable_home_is_refused_if_the_demonstration_needs_it(tmp_path: Path) -> None:
    options = ["-m", "recipes.grpo.main", f"run_dir={tmp_path}/run", "backend=local"]
    done = python("export HOME=/proc && unset TROUPE_CACHE XDG_CACHE_HOME", *options)
    assert done.returncode == 2
    assert re.search(says("model.path", "/proc/.cache", "TROUPE_CACHE"), done.stderr.strip().splitlines()[-1])
    assert not (tmp_path / "run").exists()

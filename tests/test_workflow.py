""".github/workflows/tests.yml, as far as it can be held to the rest of the project without the host that runs it."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from typing import Any

import pytest
import yaml

from tests.docs_pages import ROOT, options_of_shell, text_of

WORKFLOW: dict[Any, Any] = yaml.safe_load(text_of(".github/workflows/tests.yml"))
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
EVENTS: dict[str, Any] = WORKFLOW[True]
"""YAML 1.1 reads the key `on` so; the host reads it as a word."""
PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]


def commands_of(job: str) -> list[str]:
    """What the job runs, step by step."""
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def pythons_of(job: str) -> list[str]:
    """The versions that the job sets up."""
    (asked,) = [
        step["with"]["python-version"] for step in JOBS[job]["steps"] if "python-version" in step.get("with", {})
    ]
    return JOBS[job]["strategy"]["matrix"]["python"] if asked == "${{ matrix.python }}" else [asked]


def supported() -> list[str]:
    """The versions of Python that the project's classifiers name."""
    return re.findall(r"Python :: (\d\.\d+)", "\n".join(PROJECT["classifiers"]))


def test_each_tier_has_a_job_which_changes_or_the_clock_start() -> None:
    assert set(EVENTS) == {"push", "pull_request", "schedule", "workflow_dispatch"}
    started = {job: re.findall(r"github\.event_name == '(\w+)'", JOBS[job]["if"]) for job in JOBS}
    assert started == {
        "default": ["push", "pull_request"],
        "full": ["push", "pull_request"],
        "nightly": ["schedule", "workflow_dispatch"],
    }
    assert commands_of("default")[-1] == "bash scripts/test.sh"
    assert commands_of("full")[-1] == "bash .ci/run"
    assert commands_of("nightly")[-2:] == ["bash scripts/test.sh --nightly", "bash scripts/oracle.sh"]
    assert "bash scripts/test.sh --full" in text_of(".ci/run")


def test_the_default_tier_runs_on_every_python_that_is_supported_and_the_others_on_the_first() -> None:
    assert supported() == ["3.11", "3.12"]
    assert PROJECT["requires-python"] == ">=3.11,<3.13"
    assert pythons_of("default") == supported()
    assert pythons_of("full") == pythons_of("nightly") == supported()[:1]


@pytest.mark.parametrize("job", JOBS)
def test_a_command_of_a_job_names_scripts_options_and_extras_that_there_are(job: str) -> None:
    assert commands_of(job)
    for command in commands_of(job):
        assert subprocess.run(["bash", "-n"], input=command, text=True).returncode == 0
        if command.startswith("command -v "):  # looks for a browser
            continue
        shell, script, *words = shlex.split(command)
        assert shell == "bash"
        assert (ROOT / script).is_file()
        assert {word for word in words if word.startswith("--")} <= options_of_shell(script)
        if script == "scripts/setup.sh":
            extras = [word for word in words if word.isalpha()]
            assert extras == re.findall(r"default\) extras=\((.*?)\)", text_of("scripts/test.sh"))[0].split()
            assert set(extras) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("job", JOBS)
def test_a_job_may_only_read_ends_some_time_and_takes_actions_of_a_version(job: str) -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "permissions" not in JOBS[job]
    assert 0 < JOBS[job]["timeout-minutes"] <= 360  # which is what the host gives
    actions = [step["uses"] for step in JOBS[job]["steps"] if "uses" in step]
    assert [action.partition("@")[0] for action in actions] == ["actions/checkout", "actions/setup-python"]
    assert all(re.fullmatch(r"[\w/-]+@v\d+", action) for action in actions)


def test_the_files_that_the_cache_of_packages_goes_by_are_there() -> None:
    for job in JOBS.values():
        (setup,) = [step["with"] for step in job["steps"] if "cache" in step.get("with", {})]
        assert setup["cache"] == "pip"
        for name in setup["cache-dependency-path"].split():
            assert (ROOT / name).is_file()


def test_a_newer_commit_ends_the_tests_of_an_older_one_and_none_ends_a_night() -> None:
    assert WORKFLOW["concurrency"]["cancel-in-progress"] is True
    assert "github.ref" in WORKFLOW["concurrency"]["group"]
    assert "github.event_name" in WORKFLOW["concurrency"]["group"]

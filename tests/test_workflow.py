"""Checks of the workflow files for the code host that are possible without it."""

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
PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]


def commands_of(job: str) -> list[str]:
    """Return the commands of the steps of a job."""
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


@pytest.mark.parametrize("job", JOBS)
def test_scripts_options_and_extras_of_job_commands_exist(job: str) -> None:
    assert commands_of(job)
    for command in commands_of(job):
        assert subprocess.run(["bash", "-n"], input=command, text=True).returncode == 0
        if command.startswith("command -v "):  # searches for a browser
            continue
        shell, script, *words = shlex.split(command)
        assert shell == "bash"
        assert (ROOT / script).is_file()
        assert {word for word in words if word.startswith("--")} <= options_of_shell(script)
        if script == "scripts/setup.sh":
            extras = [word for word in words if word.isalpha()]
            assert extras == re.findall(r"default\) extras=\((.*?)\)", text_of("scripts/test.sh"))[0].split()
            assert set(extras) <= set(PROJECT["optional-dependencies"])


def test_the_files_of_the_package_cache_key_exist() -> None:
    for job in JOBS.values():
        (setup,) = [step["with"] for step in job["steps"] if "cache" in step.get("with", {})]
        assert setup["cache"] == "pip"
        for name in setup["cache-dependency-path"].split():
            assert (ROOT / name).is_file()


RELEASE: dict[Any, Any] = yaml.safe_load(text_of(".github/workflows/release.yml"))
(BUILD,) = RELEASE["jobs"].values()
FORMS = sorted(path.name for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*_*.yml"))


def test_the_commands_of_a_release_name_files_and_modules_that_exist() -> None:
    commands = "\n".join(step["run"] for step in BUILD["steps"] if "run" in step)
    assert subprocess.run(["bash", "-n"], input=commands, text=True).returncode == 0
    assert all((ROOT / file).is_file() for file in re.findall(r"(?:tests|scripts)/[\w/]+\.\w+", commands))
    assert "tests/test_wheel.py" in commands
    site = re.search(r'check "site" env (.*)', text_of(".ci/run"))
    assert site is not None
    assert site[1] in commands
    assert "uv" in PROJECT["optional-dependencies"]["dev"]


def test_pre_commit_hooks_are_the_checks_of_ci_and_a_file_size_limit() -> None:
    (local,) = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    hooks = {hook["id"]: hook["entry"] for hook in local["hooks"]}
    assert set(hooks) == {"ruff-check", "ruff-format", "sentences", "check-added-large-files"}
    assert {hooks["ruff-check"], hooks["ruff-format"]} == {
        f".venv/bin/ruff {x} --force-exclude" for x in ("check", "format")
    }
    assert ".venv/bin/ruff check ." in text_of(".ci/run")
    limit = int(hooks["check-added-large-files"].rpartition("=")[2])
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    assert [
        name for name in tracked if name and (ROOT / name).is_file() and (ROOT / name).stat().st_size > limit * 1024
    ] == []


@pytest.mark.parametrize("name", FORMS)
def test_issue_forms_are_complete_and_link_existing_pages(name: str) -> None:
    text = text_of(f".github/ISSUE_TEMPLATE/{name}")
    form = yaml.safe_load(text)
    assert {"name", "description", "body"} <= set(form)
    assert all(field["attributes"].get("label") or field["type"] == "markdown" for field in form["body"])
    names = [field["id"] for field in form["body"] if "id" in field]
    assert len(names) == len(set(names))
    assert all((ROOT / file).is_file() for file in re.findall(r"(?:docs|scripts|recipes)/[\w/]+\.\w+", text))

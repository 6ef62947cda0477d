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
EVENTS: dict[str, Any] = WORKFLOW[True]
"""YAML 1.1 parses the key `on` as True. The code host reads it as a string."""
PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]


def commands_of(job: str) -> list[str]:
    """Return the commands of the steps of a job."""
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def pythons_of(job: str) -> list[str]:
    """Return the versions of Python that the job sets up."""
    (version,) = [
        step["with"]["python-version"] for step in JOBS[job]["steps"] if "python-version" in step.get("with", {})
    ]
    return JOBS[job]["strategy"]["matrix"]["python"] if version == "${{ matrix.python }}" else [version]


def supported() -> list[str]:
    """Return the versions of Python in the project's classifiers."""
    return re.findall(r"Python :: (\d\.\d+)", "\n".join(PROJECT["classifiers"]))


def test_each_tier_has_a_job_with_a_trigger() -> None:
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


def test_the_default_tier_runs_on_every_supported_python_and_other_tiers_on_the_first() -> None:
    assert supported() == ["3.11", "3.12"]
    assert PROJECT["requires-python"] == ">=3.11,<3.13"
    assert pythons_of("default") == supported()
    assert pythons_of("full") == pythons_of("nightly") == supported()[:1]


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


@pytest.mark.parametrize("job", JOBS)
def test_jobs_have_read_permission_a_timeout_and_pinned_actions(job: str) -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "permissions" not in JOBS[job]
    assert 0 < JOBS[job]["timeout-minutes"] <= 360  # the variable that the code host sets
    actions = [step["uses"] for step in JOBS[job]["steps"] if "uses" in step]
    assert [action.partition("@")[0] for action in actions] == ["actions/checkout", "actions/setup-python"]
    assert all(re.fullmatch(r"[\w/-]+@v\d+", action) for action in actions)


def test_the_files_of_the_package_cache_key_exist() -> None:
    for job in JOBS.values():
        (setup,) = [step["with"] for step in job["steps"] if "cache" in step.get("with", {})]
        assert setup["cache"] == "pip"
        for name in setup["cache-dependency-path"].split():
            assert (ROOT / name).is_file()


def test_a_newer_commit_cancels_older_tests_but_not_nightly_runs() -> None:
    assert WORKFLOW["concurrency"]["cancel-in-progress"] is True
    assert "github.ref" in WORKFLOW["concurrency"]["group"]
    assert "github.event_name" in WORKFLOW["concurrency"]["group"]


RELEASE: dict[Any, Any] = yaml.safe_load(text_of(".github/workflows/release.yml"))
(BUILD,) = RELEASE["jobs"].values()
FORMS = sorted(path.name for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*_*.yml"))


def test_a_version_tag_builds_wheel_and_site_without_publishing() -> None:
    assert RELEASE[True]["push"] == {"tags": ["v*"]}
    assert RELEASE["permissions"] == {"contents": "read"}
    assert "permissions" not in BUILD
    assert 0 < BUILD["timeout-minutes"] <= 120
    actions = [step["uses"] for step in BUILD["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in actions)
    uploaded = [step["with"]["path"] for step in BUILD["steps"] if "upload-artifact" in step.get("uses", "")]
    assert uploaded == ["dist/troupe-*", "site"]


def test_the_commands_of_a_release_name_files_and_modules_that_exist() -> None:
    commands = "\n".join(step["run"] for step in BUILD["steps"] if "run" in step)
    assert subprocess.run(["bash", "-n"], input=commands, text=True).returncode == 0
    assert all((ROOT / file).is_file() for file in re.findall(r"(?:tests|scripts)/[\w/]+\.\w+", commands))
    assert "tests/test_wheel.py" in commands
    site = re.search(r'check "site" env (.*)', text_of(".ci/run"))
    assert site is not None
    assert site[1] in commands
    assert "uv" in PROJECT["optional-dependencies"]["dev"]


def test_dependabot_reads_the_files_that_hold_versions() -> None:
    updates = yaml.safe_load(text_of(".github/dependabot.yml"))["updates"]
    assert {(entry["package-ecosystem"], entry["directory"]) for entry in updates} == {
        ("pip", "/"),
        ("github-actions", "/"),
    }


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


def test_issue_forms_exist_for_bugs_features_and_algorithm_questions() -> None:
    assert FORMS == ["algorithm_question.yml", "bug_report.yml", "feature_request.yml"]


@pytest.mark.parametrize("name", FORMS)
def test_issue_forms_are_complete_and_link_existing_pages(name: str) -> None:
    text = text_of(f".github/ISSUE_TEMPLATE/{name}")
    form = yaml.safe_load(text)
    assert {"name", "description", "body"} <= set(form)
    assert all(field["attributes"].get("label") or field["type"] == "markdown" for field in form["body"])
    names = [field["id"] for field in form["body"] if "id" in field]
    assert len(names) == len(set(names))
    assert all((ROOT / file).is_file() for file in re.findall(r"(?:docs|scripts|recipes)/[\w/]+\.\w+", text))

"""environment.json: the environment of a run."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from plugins.provenance.environment import git_state, write_environment


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=trunk"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_code_state_has_commit_branch_and_changed_files(tmp_path: Path) -> None:
    git(tmp_path, "init")
    for name in ("a b.py", "c.py"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "branch": "trunk", "dirty": False, "changed_files": []}
    (tmp_path / "a b.py").write_text("2")
    git(tmp_path, "mv", "c.py", "d.py")
    for number in range(60):
        (tmp_path / f"new_{number:02}").write_text("")
    git(tmp_path, "checkout", "--detach")
    state = git_state(tmp_path)
    assert state is not None
    assert (state["branch"], state["dirty"], len(state["changed_files"])) == (None, True, 50)
    assert state["changed_files"][:4] == ["a b.py", "c.py", "d.py", "new_00"]


def test_code_outside_of_git_has_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init")
    installed = tmp_path / ".venv" / "lib"
    installed.mkdir(parents=True)
    (installed / "code.py").write_text("")
    (tmp_path / ".gitignore").write_text(".venv")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    assert git_state(tmp_path) is not None
    assert git_state(installed) is None
    monkeypatch.setenv("PATH", str(installed))  # git is not available
    assert git_state(tmp_path) is None


def test_the_environment_file_has_the_newest_start_and_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text('{"time": "half a fi')
    first = write_environment(tmp_path)
    second = write_environment(tmp_path)
    third = write_environment(tmp_path)
    assert json.loads((tmp_path / "environment.json").read_text()) == {**third, "earlier": [first, second]}
    assert third["hardware"]["memory_bytes"] > 2**28
    assert third["hardware"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert third["hostname"] == os.uname().nodename


def test_gpus_are_named_by_nvidia_smi_with_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --query-gpu=name ] && echo "NVIDIA H200" && echo "NVIDIA H200"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("components.process.program_output._TIMEOUT_S", 300.0)
    assert write_environment(tmp_path)["hardware"]["gpus"] == ["NVIDIA H200", "NVIDIA H200"]
    program.write_text("#!/bin/sh\nexec sleep infinity\n")
    monkeypatch.setattr("components.process.program_output._TIMEOUT_S", 0.2)
    assert write_environment(tmp_path)["hardware"]["gpus"] == []

"""Only a run can use the Ray cluster that it starts: without its token no job is accepted and no node joins."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says

ROOT = Path(__file__).parents[1]
JOB = """
import json, os, sys
from pathlib import Path
from core import BaseWorkload, JobBuilder, RoleGroup, trainer_invocation
from ray._private.parameter import RayParams

# The agent's usual port is that of the first Ray of a machine, and a second one goes without.
RayParams.__init__.__defaults__ = tuple(0 if value == 52365 else value for value in RayParams.__init__.__defaults__)

class Counter(BaseWorkload):
    @trainer_invocation
    def count(self, words):
        return len(words)

if __name__ == "__main__":
    builder = JobBuilder()
    builder.role("counter").run("token_job:Counter").total(1)
    with builder.build().running("token"):
        import ray
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        (port,) = (int(file.read_text()) for file in session.glob("dashboard_agent_listen_port_*"))
        counted = sum(RoleGroup("counter").count(["to", "be", "or"]))
        print(json.dumps({"counted": counted, "gcs": ray.get_runtime_context().gcs_address, "jobs_port": port,
            "token": os.environ["RAY_AUTH_TOKEN_PATH"], "session": str(session)}), flush=True)
        sys.stdin.read()
"""
JOIN = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print('joined')"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Facts that a running job reports about its own Ray."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "token_job.py").write_text(JOB)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_AUTH", "RAY_ADDRESS"))}
    env["PYTHONPATH"] = f"{folder}:{ROOT}"
    # Settings of the user's shell do not disable the authentication of our Ray.
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "of-another-cluster"}
    command = [sys.executable, str(folder / "token_job.py")]
    job = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdin is not None
    assert job.stdout is not None
    lines = iter(job.stdout)
    known = json.loads(next(line for line in lines if line.startswith("{")))
    assert Path(known["session"]).is_dir()
    yield known | {"folder": str(folder)}
    job.stdin.close()
    assert job.wait(120) == 0
    assert not Path(known["session"]).exists(), "the folder of a Ray that has ended well is left behind"


def post_a_job(host: str, port: int, headers: dict[str, str]) -> int:
    """Return the HTTP status of a request that asks Ray's agent to run a command."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    body = json.dumps({"entrypoint": "true"})
    connection.request("POST", "/api/job_agent/jobs/", body, {"Content-Type": "application/json"} | headers)
    status = connection.getresponse().status
    connection.close()
    return status


def join(address: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Return the outcome of a process that connects to the cluster, with one attempt instead of twenty."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    clean |= {"RAY_gcs_server_port_wait_time_s": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", JOIN, address]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=300)


def test_a_job_works_with_a_token_in_a_file_that_only_its_user_reads(running: dict[str, Any]) -> None:
    assert running["counted"] == 3
    file = Path(running["token"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) == 64


def test_the_token_is_in_no_command_line_and_no_environment(running: dict[str, Any]) -> None:
    token = Path(running["token"]).read_text().encode()
    shown = []
    for file in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
        try:
            text = file.read_bytes()
        except OSError:  # it has ended in the meantime, or belongs to another user
            continue
        if token in text:
            shown.append(file)
    assert shown == []


def test_other_users_cannot_access_the_sockets_and_logs_of_ray(running: dict[str, Any]) -> None:
    session = Path(running["session"])
    assert (session / "sockets").is_dir()
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.getuid() == 0 else []
    listed = subprocess.run([*other, "ls", str(session)], capture_output=True, text=True)
    assert "Permission denied" in listed.stderr or not other
    # A user who may write to a parent folder could replace the file.
    above = [folder.stat() for folder in session.parents]
    private = next(place for place, known in enumerate(above) if not known.st_mode & 0o077)
    assert all(known.st_mode & stat.S_ISVTX or not known.st_mode & 0o022 for known in above[private:])


def test_ray_starts_exactly_the_processes_that_are_needed(running: dict[str, Any]) -> None:
    session = Path(running["session"])
    programs = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_text(errors="replace").split("\0")
        except OSError:  # it has ended in the meantime
            continue
        if any(str(session) in argument for argument in command):
            programs.add(next((Path(word).name for word in command if word.endswith(".py")), Path(command[0]).name))
    assert programs == {"gcs_server", "raylet"}, "Ray's agents go by other names, all others are listed here"
    assert "address failed" not in (session / "logs" / "dashboard_agent.log").read_text()


def test_a_job_posted_without_the_token_is_refused(running: dict[str, Any]) -> None:
    host = running["gcs"].partition(":")[0]
    assert post_a_job(host, running["jobs_port"], {}) == 401
    assert post_a_job(host, running["jobs_port"], {"Authorization": f"Bearer {secrets.token_hex(32)}"}) == 403


def test_a_job_posted_with_the_token_passes_authentication(running: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {Path(running['token']).read_text()}"}
    assert post_a_job(running["gcs"].partition(":")[0], running["jobs_port"], headers) not in (401, 403)


def test_only_a_client_with_the_token_can_connect(running: dict[str, Any]) -> None:
    without = join(running["gcs"], RAY_AUTH_MODE="disabled")
    another = join(running["gcs"], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    for stranger in (without, another):
        assert stranger.returncode != 0
        assert "joined" not in stranger.stdout
        assert "InvalidAuthToken" in stranger.stderr or "AuthenticationError" in stranger.stderr
    owner = join(running["gcs"], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=running["token"])
    assert owner.stdout == "joined\n", owner.stderr


def test_the_token_file_is_removed_with_the_job_and_the_environment_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core.backends.ray_token import own_token

    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    mode = os.environ.get("RAY_AUTH_MODE")
    with own_token(tmp_path / "folder") as file:
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(file)
        assert "RAY_AUTH_TOKEN" not in os.environ
    assert not (tmp_path / "folder").exists()
    assert os.environ["RAY_AUTH_TOKEN"] == "the user's"
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert os.environ.get("RAY_AUTH_MODE") == mode


SUBMIT = """
from core import JobBuilder

builder = JobBuilder().device_type("CPU")
builder.role("a").run("token_job:Counter")
print(builder.build().submit("a").error)
"""


@pytest.mark.parametrize("token_state", ["another", "none", "no file", "disabled"])
def test_a_job_without_the_token_of_its_cluster_gets_an_error_that_names_the_token(
    running: dict[str, Any], tmp_path: Path, token_state: str
) -> None:
    (tmp_path / "token").write_text(secrets.token_hex(32))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    env |= {"PYTHONPATH": f"{running['folder']}:{ROOT}", "RAY_ADDRESS": running["gcs"], "HOME": str(tmp_path)}
    if token_state != "disabled":
        env["RAY_AUTH_MODE"] = "token"
    if token_state in ("another", "no file"):
        env["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / ("token" if token_state == "another" else "missing"))
    done = subprocess.run([sys.executable, "-c", SUBMIT], env=env, capture_output=True, text=True, timeout=300)
    facts = ("JobError", running["gcs"], "token", "RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN_PATH")
    assert re.search(says(*facts), done.stdout), done.stdout + done.stderr
    assert not (tmp_path / ".ray").exists(), "a token of no use was made"

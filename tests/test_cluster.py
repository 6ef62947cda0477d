"""scripts/cluster with two Ray nodes on this machine.

Ray and its job server are real. Slurm's commands are replaced by scripts that run their arguments.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest

from tests.messages import says
from tests.processes import is_alive
from tests.recipe_copies import write_untrained

ROOT = Path(__file__).resolve().parents[1]
SUBMIT = ROOT / "scripts" / "cluster" / "submit.py"
RAY = Path(sys.executable).with_name("ray")
NODE = ["--num-cpus=8", "--num-gpus=0", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
LIMIT_S = 500
"""Timeout against a hang. The slowest test takes a fifth of it on a busy machine."""
SMALL = "data.path=task:sort data.max_samples=4 prompts_per_step=4 samples_per_prompt=2 rollout.max_new_tokens=4"
MAIN = """
import sys
from core import JobBuilder

def main():
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    builder = JobBuilder().device_type("CPU").config(options).recovery(stop_grace=120)
    builder.role("trainer").run("toy.parts:Trainer")
    builder.role("place").train("toy.parts:Place").nnodes(2).nproc_per_node(1)
    job = builder.build()
    if "--dry_run" in sys.argv:
        print(job.model_dump_json())
        return 0
    if "fail" in options:
        return int(options["fail"])
    result = job.submit("toy")
    print(result.error)
    return result.exit_code

if __name__ == "__main__":
    sys.exit(main())
"""
PARTS = """
import time
from pathlib import Path
from core import BaseTrainer, BaseWorkload, trainer_invocation

class Place(BaseWorkload):
    @trainer_invocation()
    def node(self):
        import ray
        return ray.get_runtime_context().get_node_id()

class Trainer(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        self.info(f"nodes {len(set(self.RG_PLACE.node()))}, code in {Path(__file__).parents[1]}")
        while not self.stop_requested:
            time.sleep(0.05)
        self.info("saved")
"""
SLURM = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": "printf '%s\\n' node-a node-b\n",
    "sbatch": (
        "export SLURM_JOB_ID=$PORT_OFFSET SLURM_JOB_NODELIST='node-[a-b]' SLURM_CPUS_ON_NODE=4\n"
        'echo "batch $$"\nexec bash "$1"\n'
    ),
}


@dataclass
class RayNodes:
    """A cluster of two nodes."""

    address: str
    env: dict[str, str]
    """Variables with the path of the token."""
    headers: dict[str, str]
    """The token for clients in the process of the tests, which may have another Ray with another token."""


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    """Without this checkout on the path, so that a job imports the uploaded code. And without the tests' own Ray."""
    ours = ("PYTHONPATH", "RAY_ADDRESS", "RAY_AUTH")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return env | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"} | more


def await_nodes(count: int, address: str, env: dict[str, str]) -> None:
    command = [sys.executable, str(SUBMIT.with_name("await_nodes.py")), str(count)]
    subprocess.run(command, env=env | {"RAY_ADDRESS": address}, check=True, timeout=LIMIT_S)


def await_agent(address: str, headers: dict[str, str]) -> None:
    """Wait until the job server accepts a job, which needs a process of the head that starts last."""
    from ray.job_submission import JobSubmissionClient

    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            JobSubmissionClient(address, headers=headers).submit_job(entrypoint="true")
            return
        except (ConnectionError, RuntimeError):
            assert time.monotonic() < deadline, "the job server takes no job"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Start a head with a job server, and a second node with its own folder. They are ended by their process ids."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # the paths of sockets have a maximum length
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(secrets.token_hex(32))
    env = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(folder / "token"))
    headers = {"Authorization": f"Bearer {(folder / 'token').read_text()}"}
    port, board = free_port(), free_port()
    head = [f"--port={port}", f"--dashboard-port={board}", "--head", f"--temp-dir={folder / 'a'}"]
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "log").open("wb") as log:
        try:
            for count, words in enumerate((head, [f"--address=127.0.0.1:{port}", f"--temp-dir={folder / 'b'}"]), 1):
                # The default port may belong to another cluster, and without the agent no job is accepted.
                agent = f"--dashboard-agent-listen-port={free_port()}"
                command = [str(RAY), "start", *NODE, *words, agent]
                started.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log))
                await_nodes(count, f"127.0.0.1:{port}", env)
            await_agent(f"http://127.0.0.1:{board}", headers)
            yield RayNodes(f"http://127.0.0.1:{board}", env, headers)
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(LIMIT_S)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A recipe outside of the project with two roles that report their node until they are stopped."""
    folder = tmp_path / "elsewhere" / "toy"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "main.py").write_text(MAIN)
    (folder / "parts.py").write_text(PARTS)
    shutil.copy(ROOT / "recipes" / "grpo" / "run.sh", folder)
    return folder


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """Import submit.py as a module."""
    spec = importlib.util.spec_from_file_location("submit", SUBMIT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def submit(*words: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SUBMIT), *map(str, words)]
    return subprocess.run(command, env=env or environment(), capture_output=True, text=True, timeout=LIMIT_S)


def started(*words: str | Path, env: dict[str, str]) -> tuple[subprocess.Popen[str], IO[str]]:
    command = [sys.executable, str(SUBMIT), *map(str, words)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    return process, process.stdout


def on_ray(recipe: str | Path, nodes: RayNodes) -> list[str | Path]:
    return ["ray", recipe, "--address", nodes.address, "--python", sys.executable]


def nodes_of(role: str, nodes: RayNodes) -> list[str]:
    """Return the node of each process of a role."""
    from ray.util.state import StateApiClient
    from ray.util.state.common import ListApiOptions, StateResource

    client = StateApiClient(nodes.address, headers=nodes.headers)
    actors: list[Any] = client.list(StateResource.ACTORS, ListApiOptions(), raise_on_missing_output=True)
    return [actor.node_id for actor in actors if actor.class_name == role]


def test_every_file_of_the_packages_is_uploaded() -> None:
    folders = [f"./{name}" for name in ("core", "components", "agents", "training", "plugins", "recipes", "scripts")]
    not_shipped = ROOT / "scripts" / "cluster" / "not_shipped.txt"
    command = ["tar", "-C", str(ROOT), "--anchored", f"--exclude-from={not_shipped}", "-cf", "-", *folders]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        shipped = {name.removeprefix("./") for name in files.getnames()}
    required = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".yaml", ".csv", ".sh", ".js", ".css"}
    }
    assert required - shipped == set()


@pytest.mark.full
def test_grpo_trains_on_two_nodes_with_uploaded_code(nodes: RayNodes, tmp_path: Path) -> None:
    options = [f"model.path={write_untrained(tmp_path / 'model')}", f"run_dir={tmp_path}/run", *SMALL.split()]
    options += ["placement.nodes=2", "placement.actor_ranks=2"]
    done = submit(*on_ray("recipes/grpo", nodes), "--", *options, env=nodes.env)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 1)
    first, second = nodes_of("ACTOR", nodes)
    assert first != second


@pytest.mark.full
def test_a_job_without_the_token_of_the_cluster_is_refused(nodes: RayNodes) -> None:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    stranger = {"Authorization": f"Bearer {secrets.token_hex(32)}"}
    with pytest.raises(AuthenticationError):
        JobSubmissionClient(nodes.address, headers=stranger).submit_job(entrypoint="true")


@pytest.mark.nightly
def test_ctrl_c_lets_the_job_save_and_ends_with_130(nodes: RayNodes, toy: Path, tmp_path: Path) -> None:
    process, output = started(*on_ray(toy, nodes), "--", f"run_dir={tmp_path}/run", env=nodes.env)
    lines = []
    for line in output:
        lines.append(line)
        if line.startswith("nodes"):
            process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130, "".join(lines[-12:])
    (where,) = [line for line in lines if line.startswith("nodes")]
    assert where.startswith("nodes 2, code in ")
    assert "/_ray_pkg_" in where
    assert "saved\n" in lines


@pytest.mark.full
def test_the_exit_code_is_that_of_the_run(nodes: RayNodes, toy: Path) -> None:
    done = submit(*on_ray(toy, nodes), "--", "run_dir=/any", "fail=7", env=nodes.env)
    assert done.returncode == 7, done.stdout + done.stderr


@pytest.mark.full
def test_an_unreachable_server_is_reported(toy: Path) -> None:
    with socket.socket() as closed:  # bound, but nothing listens
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = submit("ray", toy, "--address", address, "--", "run_dir=/any")
    assert done.returncode == 2
    assert re.search(says("toy", address, "ray[default]"), done.stderr.splitlines()[-1])


@pytest.mark.nightly
def test_a_slurm_job_starts_its_nodes_and_ends_them_after_saving(toy: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in SLURM.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tools / name).chmod(0o755)
    env = environment(PATH=f"{tools}:{os.environ['PATH']}", PORT_OFFSET=str(free_port() % 10000))
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"):
        env.pop(name, None)
    process, output = started("slurm", toy, "--nodes", "2", "--", f"run_dir={tmp_path}/run", env=env)
    lines: list[str] = []
    steps: list[int] = []
    batch = 0
    for line in output:
        lines.append(line)
        if line.startswith("batch "):
            batch = int(line.split()[1])
        if line.startswith("nodes 2, code in"):
            steps = [int(pid) for pid in Path(f"/proc/{batch}/task/{batch}/children").read_text().split()]
            os.kill(batch, signal.SIGTERM)
    assert process.wait(LIMIT_S) == 130, "".join(lines[-12:])
    assert "saved\n" in lines
    assert re.search(says("toy", 130), lines[-1])
    assert len(steps) == 3 and not any(is_alive(pid) for pid in steps)
    script = (tmp_path / "run" / "job.sbatch").read_text()
    assert f"#SBATCH --output={tmp_path}/run/logs/slurm-%j.log\n" in script


def plan_of(run_dir: str, machines: int = 1) -> dict[str, Any]:
    """The parts of a plan that submit.py uses."""
    bundles = [{"machine": ["ACTOR", index]} for index in range(machines)]
    return {"config": {"run_dir": run_dir}, "placement": {"bundles": bundles}}


def test_a_dry_run_prints_a_valid_bash_script_with_the_requested_resources_and_options(
    module: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--nodes", "2", "--gpus_per_node", "8", "--time", "1:00:00", "--account", "me"]
    options = ["placement.nodes=2", f"run_dir={tmp_path}/run", "data.path=task:sort", "log.wandb_name=it's mine"]
    done = submit("slurm", "recipes/grpo", *flags, "--dry_run", "--", *options)
    assert done.returncode == 0, done.stderr
    for directive in ("nodes=2", "gpus-per-node=8", "time=1:00:00", "account=me", "requeue", "signal=B:TERM@660"):
        assert f"\n#SBATCH --{directive}\n" in done.stdout
    assert f"'log.wandb_name=it'\"'\"'s mine' run_dir={tmp_path}/run &\n" in done.stdout
    assert done.stdout.count("run_dir=") == 1
    assert not (tmp_path / "run").exists()
    words = ["ray", "recipes/grpo", "--address", "http://h:8265", "--gpus_per_node", "2", "--dry_run", "--", *options]
    assert module.run_on_ray(module.parse(words), plan_of("/shared/run")) == 0
    script = capsys.readouterr().out
    assert "-- exec env CUDA_VISIBLE_DEVICES=0,1 python -m recipes.grpo.main placement.nodes=2 " in script
    assert '"RAY_JOB_STOP_WAIT_TIME_S": "660"' in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=LIMIT_S).returncode == 0


def test_unused_nodes_are_refused() -> None:
    arguments = ["slurm", "recipes/grpo", "--nodes", "4", "--gpus_per_node", "8", "--dry_run", "--"]
    done = submit(*arguments, "run_dir=/shared/run")
    assert done.returncode == 2
    assert re.search(says("--nodes 4", "placement.nodes=1", "placement.nodes=4"), done.stderr)
    done = submit(*arguments, "run_dir=/shared/run", "placement.nodes=4")
    assert done.returncode == 0, done.stderr


def test_options_rejected_by_the_recipe_are_refused_before_the_upload() -> None:
    done = submit("slurm", "recipes/grpo", "--nodes", "1", "--", "placement.nods=2")
    assert done.returncode == 2
    assert re.search(says("placement.nods", "placement.nodes"), done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["ray", "recipes/none", "--address", "x", "--"], ("recipes/none", "run.sh")),
        (["slurm", "recipes/grpo", "--nodes", "0", "--"], ("--nodes 0", 1)),
        (
            ["slurm", "recipes/grpo", "--nodes", "1", "--", "seed=1", "log.use_wandb=geheim"],
            ("log.use_wandb=***", "WANDB_API_KEY", "sbatch"),
        ),
        (
            ["ray", "recipes/grpo", "--address", "x", "--", "--use_wandb", "geheim"],
            ("--use_wandb ***", "WANDB_API_KEY"),
        ),
    ],
)
def test_invalid_arguments_are_refused_before_the_recipe_runs(
    module: ModuleType, words: list[str], facts: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.main(words) == 2
    printed = capsys.readouterr().err
    assert re.search(says(*facts), printed)
    assert "geheim" not in printed


@pytest.mark.parametrize(
    ("words", "run_dir", "facts"),
    [
        (["ray", "--address", "x"], "runs/a", ("run_dir=runs/a", "run_dir=/")),
        (["slurm", "--nodes", "2", "--time", "1 h"], "/a", ("--time", "1 h", "sbatch")),
        (["slurm", "--nodes", "2"], "/a b", ("run_dir=/a b", "%")),
        (["slurm", "--nodes", "2"], "/a", ("sbatch", "--dry_run")),
        (["slurm", "--nodes", "1"], "/a", ("--nodes 1", "--nodes 2")),
    ],
)
def test_arguments_that_contradict_the_plan_are_refused_before_the_upload(
    module: ModuleType, words: list[str], run_dir: str, facts: tuple[object, ...]
) -> None:
    kind, *rest = words
    parsed = module.parse([kind, "recipes/grpo", *rest])
    with pytest.raises(module.Refused, match=says(*facts)):
        (module.run_on_ray if kind == "ray" else module.run_on_slurm)(parsed, plan_of(run_dir, machines=2))


def test_the_uploaded_project_has_the_code_without_environment_runs_and_weights(
    module: ModuleType, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    copy = tmp_path / "copy"
    dropped = ("home/.venv/python", "home/runs/a/b", "home/core/.x", "home/recipes/g/model.safetensors", "home/docs/a")
    dropped = (*dropped, "home/core/__pycache__/a", "elsewhere/toy/.git/HEAD", "elsewhere/toy/runs/a")
    for name in (*dropped, "home/core/job.py", "home/recipes/g/models/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    copy.mkdir()
    monkeypatch.setattr(module, "ROOT", home)
    parsed = module.parse(["ray", str(toy), "--address", "x"])
    lines = module.ray_script(parsed, plan_of("/shared/run"), "toy-1").splitlines()
    ship = [line for line in lines if line.startswith("ship")]
    subprocess.run(["bash", "-euc", f"copy={copy}\n" + "\n".join(ship)], check=True, timeout=LIMIT_S)
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == [
        "core/job.py",
        "recipes/g/models/__init__.py",
        *(f"toy/{name}" for name in ("__init__.py", "main.py", "parts.py", "run.sh")),
    ]


@pytest.mark.full
def test_a_script_restarts_once_in_the_python_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "reexec_in_venv.py", tmp_path / "scripts")
    (tmp_path / "scripts" / "a.py").write_text(
        "import sys\nfrom reexec_in_venv import reexec_in_venv\nreexec_in_venv()\nprint(sys.prefix, sys.argv[1:])\n"
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "made"], check=True, timeout=LIMIT_S)
    (tmp_path / ".venv").symlink_to("made")
    hidden = tmp_path / "hidden"  # its name does not tell the version of Python
    hidden.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    hidden.chmod(0o755)

    def prefix(python: str | Path, **env: str) -> str:
        command = [python, tmp_path / "scripts" / "a.py", "b"]
        done = subprocess.run(command, env=environment(**env), capture_output=True, text=True, timeout=LIMIT_S)
        assert done.stdout.endswith(" ['b']\n"), done.stderr
        return done.stdout.split()[0]

    assert Path(prefix(sys.executable)).resolve() == tmp_path / "made"
    assert Path(prefix(tmp_path / ".venv" / "bin" / "python")).resolve() == tmp_path / "made"
    assert prefix(tmp_path / ".venv" / "bin" / "python", TROUPE_PYTHON=str(hidden)) == sys.prefix

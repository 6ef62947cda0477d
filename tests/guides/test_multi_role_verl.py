"""The guide "Multi-Role Training Example: verl": its main.py, its workers and its trainer, with small workers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from pprint import pformat
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

import core
from core import DLJobBuilder, Job
from core.backends import BackendName
from tests.guides.rows import check_rows
from tests.messages import says

ROLES = ["ACTOR_ROLLOUT", "CRITIC", "REF", "RM"]


def configuration(out: Path, **options: Any) -> Any:
    """Values of verl's configuration that the guide's main.py reads, and additional ones."""
    return OmegaConf.create(
        {
            "trainer": {"nnodes": 1, "n_gpus_per_node": 2},
            "reward_model": {"enable": True},
            "algorithm": {"use_kl_in_reward": True},
            "actor_rollout_ref": {"actor": {"use_kl_loss": False}},
            "out": str(out),
            **options,
        }
    )


def main(config: Any, gpus: int) -> Job:
    """Describe the job as the guide does, without devices."""
    OmegaConf.resolve(config)
    nodes = config.trainer.nnodes
    builder = (
        DLJobBuilder()
        .global_env({"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_LOGGING_LEVEL": "DEBUG"})
        .node_num(nodes)
        .device_per_node(gpus)
        .device_type("CPU")
        .config(config)
    )
    builder.role("actor_rollout").train("verl_roles.ActorWorker").total(gpus).resource(cpu=0.1)
    builder.role("critic").train("verl_roles.CriticWorker").total(gpus).resource(cpu=0.1)
    if config.reward_model.enable:
        builder.role("rm").train("verl_roles.RMWorker").total(gpus).resource(cpu=0.1)
    if config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss:
        builder.role("ref").train("verl_roles.ActorWorker").total(gpus).resource(cpu=0.1)
    builder.role("trainer").run("verl_roles.Trainer").resource(cpu=0.1)
    builder.with_collocation_all("trainer")
    job = builder.build()
    for workload in job.workloads.values():
        if workload.backend == "elastic":
            workload.comm_auto_setup_process_group = False
    return job


@pytest.fixture(scope="module")
def runs() -> dict[str, SimpleNamespace]:
    """Result of the run on each backend."""
    return {}


@pytest.fixture
def ran(
    backend: BackendName, runs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """Return the result of the guide's job."""
    if backend not in runs:
        out = tmp_path_factory.mktemp("verl")
        lines: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("core.supervise.master._print_line", lines.append)
            gpus = 2 if backend == "ray" else 1
            result = main(configuration(out), gpus).submit(
                job_name="dlrover-verl-ppo", backend=backend, log_dir=out / "logs"
            )
        runs[backend] = SimpleNamespace(out=out, result=result, lines=lines, gpus=gpus)
    yield runs[backend]


def test_the_job_is_described_as_in_the_guide(tmp_path: Path) -> None:
    job = main(configuration(tmp_path), 2)
    assert {name: (role.backend, role.total) for name, role in job.workloads.items()} == {
        **dict.fromkeys(ROLES, ("elastic", 2)),
        "TRAINER": ("simple", 1),
    }
    assert job.collocations == [["ACTOR_ROLLOUT", "CRITIC", "RM", "REF"]]
    assert job.global_env["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "verl_roles:CriticWorker" in pformat(job)
    left_out = configuration(tmp_path)
    left_out.reward_model.enable = left_out.algorithm.use_kl_in_reward = False
    assert set(main(left_out, 2).workloads) == {"ACTOR_ROLLOUT", "CRITIC", "TRAINER"}


def test_role_groups_call_the_methods_of_the_wrapped_worker(ran: SimpleNamespace) -> None:
    assert (ran.result.status, ran.result.error) == ("finished", ""), ran.result.traceback
    report = json.loads((ran.out / "found.json").read_text())
    assert report["initialised"] == [[True] * ran.gpus] * 3
    assert (report["texts"], report["scores"], report["updated"]) == (["A", "BC"], [1, 2], [2, 3])
    assert report["rank0"] == [6]


def test_run_of_each_worker_is_called_and_ends_with_job_end(ran: SimpleNamespace) -> None:
    ended = {path.stem for path in ran.out.glob("*.ended")}
    assert ended == {f"{role}-{rank}" for role in ROLES for rank in range(ran.gpus)}


def test_output_of_a_role_is_shown_with_its_name_and_logged(ran: SimpleNamespace) -> None:
    assert "CRITIC-0: waits for the end spawn" in ran.lines
    assert "waits for the end spawn" in (ran.out / "logs" / "critic-0.log").read_text()


def one_role(out: Path, path: str, calls: int) -> Any:
    """Return a job of a trainer and one critic worker."""
    builder = DLJobBuilder().device_type("CPU").config(configuration(out, calls=calls))
    builder.global_env({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    builder.role("trainer").run("verl_roles.Waiting").resource(cpu=0.1)
    return builder.role("critic").run(path).resource(cpu=0.1)


def test_an_error_in_run_ends_the_job(backend: BackendName, tmp_path: Path) -> None:
    job = one_role(tmp_path, "verl_roles.Broken", 1000 if backend == "ray" else 1).build()
    result = job.submit("broken", backend=backend)
    assert result.exit_code == 1
    assert re.search(says("run() of CRITIC-0", "KeyError", "in run"), result.error)


def test_run_ends_with_the_job_even_without_job_end(backend: BackendName, tmp_path: Path) -> None:
    assert one_role(tmp_path, "verl_roles.Endless", 1).build().submit("endless", backend=backend).exit_code == 0
    assert (tmp_path / "CRITIC-0.ended").exists()


def test_the_names_of_the_guide_exist() -> None:
    assert core.MyWorkerGroup is core.WorkerGroup  # pyright: ignore[reportAttributeAccessIssue]
    assert core.DLJobBuilder is core.JobBuilder


def test_each_row_of_the_guide_names_a_test_of_this_file() -> None:
    check_rows(Path(__file__))

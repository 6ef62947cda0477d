"""Manifests of a planned run fit the schemas of KubeRay and SkyPilot, and hold what the plan needs."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
import yaml

from recipes.grpo.main import main
from tests.messages import says
from tests.plugins.manifests.schemas import RAY_JOB, SKYPILOT_TASK

PLAN = ["--assume_devices", "8x2x80GB", "placement.nodes=2", "run_dir=/shared/runs/one", "seed=7"]


def emitted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """Return the object that a command prints."""
    monkeypatch.setattr(sys, "argv", ["main.py", *words])
    assert main() == 0, capsys.readouterr().err
    return yaml.safe_load(capsys.readouterr().out)


def test_the_ray_job_of_a_plan_fits_the_schema_of_kuberay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    job = emitted(capsys, monkeypatch, "--emit", "kuberay", "--dry_run", *PLAN)
    jsonschema.validate(job, RAY_JOB)
    spec = job["spec"]
    assert spec["entrypoint"].endswith("-m recipes.grpo.main placement.nodes=2 run_dir=/shared/runs/one seed=7")
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7" in spec["entrypoint"]
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (nodes,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert nodes["replicas"] == 1
    for pod in (head, nodes["template"]["spec"]):
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environment["NCCL_SOCKET_IFNAME"] == "eth1"
        assert environment["HF_TOKEN"] is None
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"runs": "/shared/runs", "shared-memory": "/dev/shm"}
        shared = next(volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
        assert shared["medium"] == "Memory"
        assert int(shared["sizeLimit"][:-2]) < int(container["resources"]["limits"]["memory"][:-2])
    assert "hf_abcdef" not in yaml.safe_dump(job)


def test_the_task_of_a_plan_fits_the_schema_of_skypilot_and_its_script_is_bash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = emitted(capsys, monkeypatch, "emit=skypilot", *PLAN)
    jsonschema.validate(task, SKYPILOT_TASK)
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"].endswith(":8")
    assert task["volumes"].keys() == {"/shared/runs"}
    assert "bash recipes/grpo/run.sh placement.nodes=2 run_dir=/shared/runs/one seed=7" in task["run"]
    done = subprocess.run(["bash", "-n"], input=task["run"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_node_without_gpus_has_no_group_of_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = emitted(capsys, monkeypatch, "emit=kuberay", "run_dir=/shared/runs/one")
    jsonschema.validate(job, RAY_JOB)
    assert "workerGroupSpecs" not in job["spec"]["rayClusterSpec"]
    assert "nvidia.com/gpu" not in yaml.safe_dump(job)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["emit=kuberay", "run_dir=runs/one"], "run_dir=runs/one: emit=kuberay needs a folder on a volume"),
        (["emit=kuberay", "run_dir=/shared/runs/one", "log.wandb_key=abcdef0123"], "contains a key"),
        (["emit=nomad"], "emit=nomad; set it to one of none, kuberay, skypilot"),
    ],
)
def test_a_manifest_that_cannot_work_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", *words])
    assert main() == 2
    assert re.search(says(message), capsys.readouterr().err)

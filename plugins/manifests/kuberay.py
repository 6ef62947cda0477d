"""RayJob for KubeRay (`ray.io/v1`), from a planned run."""

from __future__ import annotations

import shlex
from importlib.metadata import version
from typing import Any

import yaml

from plugins.manifests.needs import STOP_S, Needs, command_line, needs_of
from training.launch.plan import Plan

IMAGE = "REGISTRY/TROUPE:TAG"
CLAIM = "TROUPE-RUNS"
HOME = "/opt/troupe"
SECRET = "troupe-keys"
HEADER = f"""\
# RayJob for KubeRay 1.1 or later: kubectl create -f FILE
# Replace {IMAGE} by an image with Python, this project in {HOME} and the packages of constraints.txt, and
# {CLAIM} by the claim of a volume that all nodes can write (ReadWriteMany).
# Keys, if the run needs them: kubectl create secret generic {SECRET} --from-literal=HF_TOKEN=...
"""


def manifest(plan: Plan) -> str:
    """Return the RayJob of a planned run as YAML.

    The first node is the head, on which the trainer runs. The run resumes if the job is created again.

    Raises:
        ConfigError: see `needs_of`.
    """
    needs = needs_of(plan, command_line())
    return HEADER + yaml.safe_dump(ray_job(needs), sort_keys=False, width=110)


def ray_job(needs: Needs) -> dict[str, Any]:
    """Return the RayJob as an object."""
    command = ["python", "-m", f"recipes.{needs.recipe}.main", *needs.options]
    if needs.gpus:
        # The driver counts the GPUs of a node by this variable: Ray hides them from a process without reservations.
        command = ["env", f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(needs.gpus)))}", *command]
    cluster: dict[str, Any] = {
        "rayVersion": version("ray"),
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0"},
            "template": _pod(needs, "ray-head"),
        },
    }
    if needs.nodes > 1:
        count = needs.nodes - 1
        group = {"groupName": "nodes", "replicas": count, "minReplicas": count, "maxReplicas": count}
        cluster["workerGroupSpecs"] = [{**group, "rayStartParams": {}, "template": _pod(needs, "ray-worker")}]
    settings = yaml.safe_dump({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)}})
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": needs.name},
        "spec": {
            "entrypoint": f"cd {HOME} && exec {shlex.join(command)}",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 60,
            "runtimeEnvYAML": settings,
            "rayClusterSpec": cluster,
        },
    }


def _pod(needs: Needs, name: str) -> dict[str, Any]:
    amounts: dict[str, Any] = {"cpu": str(needs.cpus), "memory": f"{needs.memory_gib}Gi"}
    if needs.gpus:
        amounts["nvidia.com/gpu"] = str(needs.gpus)
    environment: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in needs.environment.items()]
    for key in needs.secrets:
        reference = {"secretKeyRef": {"name": SECRET, "key": key, "optional": True}}
        environment.append({"name": key, "valueFrom": reference})
    container = {
        "name": name,
        "image": IMAGE,
        "env": environment,
        # Equal requests and limits: memory that other pods use could not be given back to a training run.
        "resources": {"limits": amounts, "requests": dict(amounts)},
        "volumeMounts": [
            {"name": "runs", "mountPath": needs.volume},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    # A pod has 64 MiB of shared memory by default. Ray's objects and the weights need more.
    memory = {"medium": "Memory", "sizeLimit": f"{needs.shared_gib}Gi"}
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": CLAIM}},
        {"name": "shared-memory", "emptyDir": memory},
    ]
    return {"spec": {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": STOP_S}}

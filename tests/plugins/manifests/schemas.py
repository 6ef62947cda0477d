"""Schemas of the fields that our manifests use. A field that is not listed fails the check.

RAY_JOB: `ray-operator/config/crd/bases/ray.io_rayjobs.yaml` of ray-project/kuberay at commit 0074129, version v1 of the
resource. Types, patterns and required fields of the listed fields are those of that file.

SKYPILOT_TASK: `get_task_schema` and `_get_single_resources_schema` in `sky/utils/schemas.py` of skypilot-org/skypilot
at commit 00052df.
"""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
NUMBER = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
TEXTS = {"type": "object", "additionalProperties": TEXT}
_DIGITS = r"(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
QUANTITY = {
    "anyOf": [{"type": "integer"}, TEXT],
    "pattern": rf"^(\+|-)?{_DIGITS}(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?{_DIGITS}))?$",
}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}


def record(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return the schema of an object without other fields."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def array(item: Any) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": item}


ENVIRONMENT = record(
    ("name",),
    name=TEXT,
    value=TEXT,
    valueFrom=record(secretKeyRef=record(("key",), name=TEXT, key=TEXT, optional=FLAG)),
)
CONTAINER = record(
    ("name",),
    name=TEXT,
    image=TEXT,
    env=array(ENVIRONMENT),
    resources=record(limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=array(record(("mountPath", "name"), mountPath=TEXT, name=TEXT)),
)
VOLUME = record(
    ("name",),
    name=TEXT,
    persistentVolumeClaim=record(("claimName",), claimName=TEXT),
    emptyDir=record(medium=TEXT, sizeLimit=QUANTITY),
)
POD = record(
    spec=record(
        ("containers",), containers=array(CONTAINER), volumes=array(VOLUME), terminationGracePeriodSeconds=NUMBER
    )
)
RAY_CLUSTER = record(
    ("headGroupSpec",),
    rayVersion=TEXT,
    headGroupSpec=record(("rayStartParams", "template"), rayStartParams=TEXTS, template=POD),
    workerGroupSpecs=array(
        record(
            ("groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"),
            groupName=TEXT,
            replicas=NUMBER,
            minReplicas=NUMBER,
            maxReplicas=NUMBER,
            rayStartParams=TEXTS,
            template=POD,
        )
    ),
)
NAME = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47}
"""Names of RayJobs have at most 47 characters, because KubeRay appends suffixes to them."""
RAY_JOB = record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=record(("name",), name=NAME),
    spec=record(
        entrypoint=TEXT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=NUMBER,
        runtimeEnvYAML=TEXT,
        rayClusterSpec=RAY_CLUSTER,
    ),
)
SKYPILOT_TASK = record(
    name=TEXT,
    workdir=TEXT,
    num_nodes={"type": "integer"},
    resources=record(
        cpus={"anyOf": [TEXT, {"type": "number"}]},
        memory={"anyOf": [TEXT, {"type": "number"}]},
        accelerators=TEXT,
    ),
    volumes=TEXTS,
    envs={
        "type": "object",
        "patternProperties": {"^[a-zA-Z_][a-zA-Z0-9_]*$": {"type": ["string", "null"]}},
        "additionalProperties": False,
    },
    secrets={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    config=record(docker=record(run_options=array(TEXT))),
    setup=TEXT,
    run=TEXT,
)

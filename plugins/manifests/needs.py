"""Nodes, resources, command and environment that a planned run needs on a cluster."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from components.models.size import model_size
from components.registry import find
from training.launch.plan import Plan
from training.options.schema import ConfigError
from training.tracking import redact

GIB = 2**30
MARGIN = 1.25
"""Factor between the planned memory of a node and the requested memory."""
LEAST_GIB = 8
"""Minimum memory of a node, in GiB."""
STORE_GIB = 2
"""Size of Ray's object store on each node, in GiB. It is in /dev/shm."""
BYTES_PER_WEIGHT = 4
"""Maximum size of a published weight, in bytes."""
STOP_S = 660
"""Seconds that a run has after a stop request for its step and its checkpoint."""
KEYS = ("HF_TOKEN", "WANDB_API_KEY")
"""Secret variables that a run may read."""
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "20000",
    "RAY_worker_niceness": "0",
}
"""Settings of Ray for every node; docs/cluster.md gives the reasons."""
_ONLY_HERE = ("dry_run", "emit", "assume_devices")
"""Options that are not part of the command on the cluster."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Requirements of a planned run."""

    name: str
    """Name of the job: lower-case letters, digits and dashes."""
    recipe: str
    nodes: int
    gpus: int
    """Number of GPUs of each node."""
    cpus: int
    """Number of cores of each node."""
    memory_gib: int
    """Memory of each node, including `shared_gib`."""
    shared_gib: int
    """Size of /dev/shm of each node: Ray's object store, and two versions of the weights."""
    options: tuple[str, ...]
    """Options of the recipe."""
    volume: str
    """Folder that all nodes share. The run folder is inside it."""
    environment: Mapping[str, str]
    """Variables for every node. None of them is secret."""
    secrets: tuple[str, ...]
    """Names of secret variables."""


def needs_of(plan: Plan, words: Sequence[str], environment: Mapping[str, str] | None = None) -> Needs:
    """Return the requirements of a planned run.

    Args:
        plan: the plan.
        words: words of the command line after the name of the recipe.
        environment: environment of the user. Default: that of this process.

    Raises:
        ConfigError: the run folder is not an absolute path below a folder, or an option contains a key.
    """
    environment = os.environ if environment is None else environment
    run_dir = PurePosixPath(plan.config.run_dir)
    if not run_dir.is_absolute() or run_dir.parent == PurePosixPath("/"):
        raise ConfigError(
            f"run_dir={run_dir}: emit={plan.config.emit} needs a folder on a volume that all nodes share; set "
            "run_dir=/SHARED/RUNS/NAME"
        )
    options = _without(words, _ONLY_HERE)
    hidden = redact(list(options))
    if wrong := [shown for shown, option in zip(hidden, options, strict=True) if shown != option]:
        raise ConfigError(
            f"the option {wrong[0]} contains a key, which a manifest would show; remove it, and set a secret"
        )
    job = plan.job
    bundles = job.placement.bundles
    cores = [0.0] * job.node_num
    for bundle, node in zip(bundles, plan.nodes, strict=True):
        cores[min(node, job.node_num - 1)] += bundle.cpu
    sizes = [size for use in plan.models if use.publishes and (size := model_size(use.path)) is not None]
    weights = max((BYTES_PER_WEIGHT * size.parameters for size in sizes), default=0)
    shared = STORE_GIB + math.ceil(2 * weights / GIB) + 1
    most = _host_bytes(plan)
    forwarded: dict[str, str] = {}
    secret: list[str] = []
    if choose := find("forwarded variables", "names"):
        forwarded, secret = choose(environment)
    gpus = 0
    if job.device_type == "GPU":
        gpus = job.device_per_node
    return Needs(
        name=re.sub(r"[^a-z0-9-]+", "-", f"{plan.recipe}-{run_dir.name}".lower()).strip("-")[:47],
        recipe=plan.recipe,
        nodes=job.node_num,
        gpus=gpus,
        cpus=math.ceil(max(cores)),
        memory_gib=max(LEAST_GIB, math.ceil(MARGIN * most / GIB)) + shared,
        shared_gib=shared,
        options=tuple(options),
        volume=str(run_dir.parent),
        environment={**RAY_SETTINGS, **forwarded},
        secrets=tuple(dict.fromkeys((*KEYS, *secret))),
    )


def command_line() -> list[str]:
    """Return the words of this process's command line after the program."""
    return sys.argv[1:]


def _without(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the words without these options, written as `name=value`, `--name value` or `--name`."""
    kept: list[str] = []
    drops_next = False
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if name in names:
            # `--dry_run` is a flag, so the next word is another option.
            drops_next = word.startswith("--") and not value and name != "dry_run"
        elif drops_next:
            drops_next = False
        else:
            kept.append(word)
    return kept


def _host_bytes(plan: Plan) -> float:
    """Return the maximum planned host memory of a node in bytes, or 0 if no plug-in plans it."""
    places = [] if plan.memory is None else plan.memory.fields().get("places", [])
    return max((place["most"] for place in places if place["place"].startswith(("node", "this machine"))), default=0)

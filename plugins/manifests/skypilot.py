"""SkyPilot task, from a planned run."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from plugins.manifests.needs import Needs, command_line, needs_of
from training.launch.plan import Plan

ACCELERATOR = "H100"
VOLUME = "troupe-runs"
TOKEN = "RAY_AUTH_TOKEN"
PORT = 6385
"""Port of Ray's head. SkyPilot's own Ray uses 6380."""
HEADER = f"""\
# SkyPilot task, from a clone of this project: sky launch FILE --secret {TOKEN}=$(openssl rand -hex 32)
# Replace {ACCELERATOR} by your GPU, and {VOLUME} by a volume that all nodes can write.
"""
RUN = """\
set -euo pipefail
python=.venv/bin/python
ray=.venv/bin/ray
head="$(head -n1 <<<"$SKYPILOT_NODE_IPS")"
ip="$(sed -n "$((SKYPILOT_NODE_RANK + 1))p" <<<"$SKYPILOT_NODE_IPS")"
export RAY_AUTH_MODE=token
start=("$ray" start "--node-ip-address=$ip" --disable-usage-stats --temp-dir=/tmp/troupe-ray {resources})
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
    # Ends with the head. The exit code of the job is that of the head.
    "${{start[@]}}" "--address=$head:{port}" --block || true
    exit 0
fi
"${{start[@]}}" --head --port={port} --include-dashboard=false
trap '"$ray" stop' EXIT
export RAY_ADDRESS="$head:{port}"
timeout 600 "$python" scripts/cluster/await_nodes.py "$SKYPILOT_NUM_NODES"
{command}
"""


def manifest(plan: Plan) -> str:
    """Return the SkyPilot task of a planned run as YAML. The run resumes if the task is launched again.

    Raises:
        ConfigError: see `needs_of`.
    """
    needs = needs_of(plan, command_line())
    return HEADER + yaml.dump(task(needs), Dumper=_Dumper, sort_keys=False, width=110)


def task(needs: Needs) -> dict[str, Any]:
    """Return the task as an object."""
    command = shlex.join(["bash", f"recipes/{needs.recipe}/run.sh", *needs.options])
    resources = f"--num-cpus={needs.cpus}"
    if needs.gpus:
        resources += f" --num-gpus={needs.gpus}"
    requested: dict[str, Any] = {"cpus": f"{needs.cpus}+", "memory": f"{needs.memory_gib}+"}
    if needs.gpus:
        requested["accelerators"] = f"{ACCELERATOR}:{needs.gpus}"
    return {
        "name": needs.name,
        "workdir": ".",
        "num_nodes": needs.nodes,
        "resources": requested,
        "volumes": {needs.volume: VOLUME},
        "envs": dict(needs.environment),
        # Without a value: SkyPilot takes it from `--secret`, and never shows it.
        "secrets": {TOKEN: None},
        # In a container /dev/shm has 64 MiB by default. Ray's objects and the weights need more.
        "config": {"docker": {"run_options": [f"--shm-size={needs.shared_gib}g"]}},
        "setup": "bash scripts/setup.sh",
        "run": RUN.format(resources=resources, port=PORT, command=command),
    }


class _Dumper(yaml.SafeDumper):
    """Dumper that writes texts of several lines as blocks."""


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style={True: "|"}.get("\n" in text))


_Dumper.add_representer(str, _as_block)

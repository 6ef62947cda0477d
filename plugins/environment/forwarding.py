"""Variables of the user's environment that the workers of a job get.

The workers on a cluster that was started elsewhere have the environment in which Ray was started on their node. They
would otherwise ignore what a user sets for NCCL, torch or vLLM in the shell of the command.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from core import Job
from core.job import RESERVED_ENVIRONMENT
from training.tracking.redaction import redact

PATTERNS = (
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*", "PYTORCH_*", "TORCH_*", "VLLM_*", "HF_*", "OMP_*"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""Names of variables that are forwarded. `*` stands for any end of a name."""
INTERFACE = "TROUPE_INTERFACE"
"""Environment variable with the name of the network interface, such as `eth1`."""
ADDRESS_FROM = "TROUPE_ADDRESS_FROM"
"""Environment variable with the path of the function by which a worker finds its address (core/backends)."""
_NODE_ADDRESS = f"{__name__.rpartition('.')[0]}.interface:node_address"
MORE = "TROUPE_FORWARD"
"""Environment variable with further names or patterns, separated by commas."""


def prepare(job: Job, config: Any, environment: Mapping[str, str] | None = None) -> list[str]:
    """Add the user's variables and the network interface to the environment of a job's workers.

    Args:
        job: job, whose `global_env` is changed. Variables that it sets already are kept.
        config: options of the run.
        environment: environment of the user. Default: that of this process.

    Returns:
        Lines for the user, with the names of the variables and never their values.
    """
    environment = os.environ if environment is None else environment
    lines: list[str] = []
    if config.placement.interface:
        job.global_env |= {INTERFACE: config.placement.interface, ADDRESS_FROM: _NODE_ADDRESS}
    # The processes of a cluster that the run starts itself inherit this environment.
    if "RAY_ADDRESS" not in environment:
        return lines
    job.global_env[ADDRESS_FROM] = _NODE_ADDRESS
    chosen, secret = forwarded(environment)
    added = {name: value for name, value in chosen.items() if name not in job.global_env}
    job.global_env |= added
    if added:
        lines.append(f"the workers get these variables of this shell: {', '.join(sorted(added))}")
    if secret:
        lines.append(
            f"the workers do not get {', '.join(secret)}, which Ray's dashboard would show; set keys and "
            "tokens where Ray is started"
        )
    return lines


def forwarded(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that workers get, and the names of those that are secret, which they do not get."""
    more = tuple(pattern.strip() for pattern in environment.get(MORE, "").split(",") if pattern.strip())
    chosen = matching(environment, (*PATTERNS, *more))
    secret = sorted(name for name, value in chosen.items() if is_secret(name, value))
    return {name: value for name, value in chosen.items() if name not in secret}, secret


def matching(environment: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Return the variables whose names match a pattern, without those that core sets for each worker."""
    names = {name for pattern in patterns for name in environment if fnmatchcase(name, pattern)}
    return {name: environment[name] for name in sorted(names - RESERVED_ENVIRONMENT)}


def is_secret(name: str, value: str) -> bool:
    """True if a variable is a key or a token, or contains one, such as a proxy with a password."""
    return redact({name: value})[name] != value

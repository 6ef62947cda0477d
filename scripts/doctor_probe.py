"""Probes that scripts/doctor.py runs with the project's Python, each in a separate process. Each prints JSON.

Usage: `doctor_probe.py packages|torch|choice|ray HOME`. A broken package can then break only this process, and not the
page. Only a probe itself imports more than the standard library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

OURS = ("core", "components", "agents", "training", "plugins", "recipes")


def plain(name: str) -> str:
    """Return the normalised name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(home: Path) -> dict[str, Any]:
    """Return versions, version limits, unmet requirements, broken distributions, and name conflicts."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement
    versions: dict[str, str] = {}
    broken: list[str] = []
    requires: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        try:
            # The first one on the path is the one that is imported.
            name = plain(distribution.metadata["Name"])
            versions.setdefault(name, distribution.version)
            requires.setdefault(name, list(distribution.requires or ()))
        except Exception as error:  # noqa: BLE001 - any file of a broken package may be missing or unreadable
            broken.append(f"{getattr(distribution, '_path', distribution)}: {error or type(error).__name__}")
    demands: dict[str, list[str]] = {}
    unmet: list[dict[str, str]] = []
    for owner, texts in requires.items():
        for text in texts:
            try:
                requirement = Requirement(text)
                if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                    continue
                name = plain(requirement.name)
                limits = str(requirement.specifier)
                # Lower limits are not listed: only an upper one explains why a version is not the newest.
                if any(limit.operator in ("==", "<", "<=", "~=") for limit in requirement.specifier):
                    demands.setdefault(name, []).append(f"{owner} needs {name}{limits}")
                version = versions.get(name)
                if version is None or not requirement.specifier.contains(version, prereleases=True):
                    unmet.append({"owner": owner, "name": name, "needs": name + limits, "has": version or ""})
            except Exception as error:  # noqa: BLE001 - a requirement that cannot be parsed
                broken.append(f"{owner} requires {text!r}: {error}")
    return {"versions": versions, "demands": demands, "unmet": unmet, "broken": broken, "names": names(home)}


def names(home: Path) -> list[dict[str, str]]:
    """Return packages with the name of a folder of the project, and which of the two a plain Python imports."""
    conflicts = []
    for name in OURS:
        for folder in sys.path:
            place = Path(folder or ".") / name
            is_package = (place / "__init__.py").is_file() or place.with_suffix(".py").is_file()
            if not is_package or Path(folder or ".").resolve() == home:
                continue
            spec = importlib.util.find_spec(name)
            gets = ""
            if spec is not None:
                gets = next(iter(spec.submodule_search_locations or [spec.origin or ""]))
            owners = importlib.metadata.packages_distributions().get(name, [])
            owner = ", ".join(plain(owner) for owner in owners if plain(owner) != "troupe")
            conflicts.append({"name": name, "place": str(place), "owner": owner, "gets": gets})
    return conflicts


def torch(_: Path) -> dict[str, Any]:
    """Return the version of torch, its CUDA version, the GPUs it sees, and the result of a small sum."""
    import torch as module

    gpus = 0
    if module.cuda.is_available():
        gpus = module.cuda.device_count()
    return {
        "version": module.__version__,
        "cuda": module.version.cuda,
        "gpus": [module.cuda.get_device_name(index) for index in range(gpus)],
        "sum": float(module.ones(3).sum()),
    }


def choice(home: Path) -> dict[str, Any]:
    """Return what a recipe selects on this machine for options that are `auto`."""
    sys.path.insert(0, str(home))
    from components.generate.choice import choose_rollout_engine
    from components.models.attention import choose_attention
    from core.placement import detect_devices
    from plugins.sandbox.sandbox import isolation_fault
    from plugins.vllm.config import LARGE_BYTES
    from training.launch.launch import threads_each, threads_text

    gpus = detect_devices()
    return {
        "gpus": gpus,
        "rollout": choose_rollout_engine("auto", gpus, "warm_start:sort", 1.0),
        "large": LARGE_BYTES,
        "vllm": importlib.util.find_spec("vllm") is not None,
        "attention": choose_attention("auto", gpus) or "transformers' own choice",
        "precision": "bf16" if gpus else "fp32",
        "deepspeed": importlib.util.find_spec("deepspeed") is not None,
        "sandbox": isolation_fault(),
        "threads": threads_text(threads_each(1)),
    }


def process() -> int:
    """Return the process id. This is the task that `ray` runs."""
    return os.getpid()


def ray(_: Path) -> dict[str, Any]:
    """Start a local Ray, run one task, and shut it down. Return the durations in seconds."""
    import logging
    import time

    import ray as module

    from core.backends.ray import few_processes
    from core.backends.ray_token import own_token
    from core.shared_memory import shared_folder

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    began = time.monotonic()
    with own_token(shared_folder(f"doctor-{os.getpid()}")), few_processes():
        module.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        started = time.monotonic()
        pid = module.get(module.remote(process).remote(), timeout=60)
        ended = time.monotonic()
        module.shutdown()
    return {"start_s": round(started - began, 1), "task_s": round(ended - started, 1), "pid": pid}


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    # Otherwise `import ray` or `import torch` could find a file beside this script.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]
    probe = {"packages": packages, "torch": torch, "choice": choice, "ray": ray}[name]
    # On a line of its own, because imports may have printed text without a line end.
    print("\n" + json.dumps(probe(Path(folder).resolve())))

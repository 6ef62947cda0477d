"""What scripts/doctor.py asks the project's own Python, in a process of its own; prints JSON.

`doctor_probe.py packages|torch|choice|ray HOME`. Whatever is broken in that Python breaks this process alone. Standard
library only, but for what is asked about.
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
    """A distribution's name as all spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(home: Path) -> dict[str, Any]:
    """Versions of all distributions, who demands what of whom, which demands are not met, and who has our names."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement
    versions: dict[str, str] = {}
    broken: list[str] = []
    requires: dict[str, list[str]] = {}
    for found in importlib.metadata.distributions():
        try:
            name = plain(found.metadata["Name"])
            versions.setdefault(name, found.version)
            requires.setdefault(name, list(found.requires or ()))
        except Exception as error:  # noqa: BLE001 - any file of a broken package may be missing or unreadable
            broken.append(f"{getattr(found, '_path', found)}: {error or type(error).__name__}")
    demands: dict[str, list[str]] = {}
    unmet: list[dict[str, str]] = []
    for owner, lines in requires.items():
        for line in lines:
            try:
                wish = Requirement(line)
                if wish.marker is not None and not wish.marker.evaluate({"extra": ""}):
                    continue
                name, limits = plain(wish.name), str(wish.specifier)
                if any(limit.operator in ("==", "<", "<=", "~=") for limit in wish.specifier):
                    demands.setdefault(name, []).append(f"{owner} needs {name}{limits}")
                has = versions.get(name)
                if has is None or not wish.specifier.contains(has, prereleases=True):
                    unmet.append({"owner": owner, "name": name, "needs": name + limits, "has": has or ""})
            except Exception as error:  # noqa: BLE001 - a requirement that nobody can read
                broken.append(f"{owner} requires {line!r}: {error}")
    return {"versions": versions, "demands": demands, "unmet": unmet, "broken": broken, "names": names(home)}


def names(home: Path) -> list[dict[str, str]]:
    """Other packages that bear our names, and which of the two a process gets that run.sh does not start."""
    found = []
    for name in OURS:
        for folder in sys.path:
            place = Path(folder or ".") / name
            taken = (place / "__init__.py").is_file() or place.with_suffix(".py").is_file()
            if not taken or Path(folder or ".").resolve() == home:
                continue
            spec = importlib.util.find_spec(name)
            gets = next(iter(spec.submodule_search_locations or [spec.origin or ""])) if spec else ""
            owners = importlib.metadata.packages_distributions().get(name, [])
            owner = ", ".join(plain(owner) for owner in owners if plain(owner) != "troupe")
            found.append({"name": name, "place": str(place), "owner": owner, "gets": gets})
    return found


def torch(_: Path) -> dict[str, Any]:
    """Whether torch works, and what it sees."""
    import torch as module

    gpus = module.cuda.device_count() if module.cuda.is_available() else 0
    return {
        "version": module.__version__,
        "cuda": module.version.cuda,
        "gpus": [module.cuda.get_device_name(index) for index in range(gpus)],
        "sum": float(module.ones(3).sum()),
    }


def choice(home: Path) -> dict[str, Any]:
    """What a recipe would use when all is left to the machine."""
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
    """The task that `ray` runs."""
    return os.getpid()


def ray(_: Path) -> dict[str, Any]:
    """Start a local Ray, run one task, end it."""
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
    what, where = sys.argv[1:]
    # This script's own folder would be searched first.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]
    asked = {"packages": packages, "torch": torch, "choice": choice, "ray": ray}[what]
    print("\n" + json.dumps(asked(Path(where).resolve())))

"""Backends that run workloads: Ray, or the current process."""

import importlib
from collections.abc import Callable
from typing import Any, Literal

BackendName = Literal["ray", "local"]


def make_backend(name: BackendName, run_id: str, emit: Callable[[str, Any], None]) -> Any:
    """Return the backend of a run. `emit` passes messages of workloads in this process to the master."""
    # Imported here, because local mode must work without Ray, and by its name, because few runs use it.
    if name == "local":
        return importlib.import_module(f"{__name__}.local").LocalBackend(emit)
    from core.backends.ray import RayBackend

    return RayBackend(run_id)

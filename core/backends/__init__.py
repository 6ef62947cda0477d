"""Backends that run workloads: Ray, or the current process."""

from collections.abc import Callable
from typing import Any, Literal

BackendName = Literal["ray", "local"]


def make_backend(name: BackendName, run_id: str, emit: Callable[[str, Any], None]) -> Any:
    """Return the backend of a run. `emit` passes messages of workloads in this process to the master."""
    # Imported here, because local mode must work without Ray.
    if name == "local":
        from core.backends.local import LocalBackend

        return LocalBackend(emit)
    from core.backends.ray import RayBackend

    return RayBackend(run_id)

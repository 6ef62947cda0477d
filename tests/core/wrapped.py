"""A workload as DLRover's guide writes it: wrapped for Ray."""

from typing import Any

import ray

from core import BaseWorkload, info


@ray.remote
class Wrapped(BaseWorkload):
    """A workload that is wrapped by ray.remote and receives the master's handle."""

    def __init__(self, master_handle: Any, config: Any) -> None:
        super().__init__(master_handle, config)

    def run(self) -> None:
        info(f"wrapped ran as {self.name}")

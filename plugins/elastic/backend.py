"""Ray backend that reserves the resources of additional processes during a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from core.backends.ray import RayBackend
from core.plan import ProcessPlan
from core.supervise.worker_process import ProcessSpec

NODE_LABEL = "ray.io/node-id"
"""Label of Ray's nodes that holds their id."""


class ElasticRay(RayBackend):
    """Backend with one placement group for the processes of the start, and one for each additional process."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self._added: dict[int, PlacementGroup] = {}

    def reserve(self, plan: ProcessPlan, node: str | None) -> None:
        """Request the resources of an additional process, on a node or on any.

        Args:
            plan: plan of the process, with a bundle number that no other process has.
            node: Ray's id of the node, or None.
        """
        amounts = {"CPU": plan.cpu, "GPU": plan.accelerator, "memory": float(plan.memory * 2**20), **plan.custom}
        needed = {kind: amount for kind, amount in amounts.items() if amount}
        labels: Any = {}
        if node is not None:
            labels["bundle_label_selector"] = [{NODE_LABEL: node}]
        self._added[plan.bundle] = placement_group([needed], name=f"troupe-{self._run_id}-{plan.name}", **labels)

    def is_reserved(self, bundle: int) -> bool:
        """True if the resources of an additional process are reserved."""
        return placement_group_table(self._added[bundle])["state"] == "CREATED"

    def free(self, bundle: int) -> None:
        """Release the resources of an additional process. Those of the start are kept for it."""
        group = self._added.pop(bundle, None)
        if group is not None:
            self._call_ray(lambda: remove_placement_group(group))

    def create(self, spec: ProcessSpec) -> Any:
        """See `RayBackend.create`."""
        group = self._added.get(spec.plan.bundle)
        if group is None:
            return super().create(spec)
        of_start = self._group
        self._group = group
        try:
            return super().create(replace(spec, plan=spec.plan.model_copy(update={"bundle": 0})))
        finally:
            self._group = of_start

    def room_missing(self) -> str:
        """See `RayBackend.room_missing`."""
        if missing := super().room_missing():
            return missing
        # A call to a dead cluster would block.
        if self.fault() or all(map(self.is_reserved, self._added)):
            return ""
        return "the node of an additional engine has left the cluster"

    def release(self) -> None:
        """See `RayBackend.release`."""
        for bundle in list(self._added):
            self.free(bundle)
        super().release()

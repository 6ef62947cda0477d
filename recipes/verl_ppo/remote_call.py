"""What involves several worker groups, or the job as a whole. A single group is called through its own methods."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core import WorkerGroup


def sync_weights(actor: "WorkerGroup", rollout: "WorkerGroup", version: int) -> None:
    """Bring the policy as it is now to every engine that samples; their samples carry `version` from here on.

    The two are one group where a worker trains and samples.
    """
    handle = next(handle for handle in actor.publish_weights(version) if handle is not None)
    rollout.receive_weights(handle)


def end_job(*groups: "WorkerGroup") -> None:
    """Tell all workers that no call will follow; a group that is there twice is told once."""
    for ending in [group.call("end_job") for group in {id(group): group for group in groups}.values()]:
        ending.result()

"""Calls to several roles or to the whole job. A single role is called through the role groups of the trainer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from core import Future, Role, RoleGroup

if TYPE_CHECKING:
    from components.weights.publisher import WeightHandle


def sync_weights(version: int) -> dict[str, float]:
    """Send the current policy to every rollout engine. Later responses have `version` as their weight version.

    Returns:
        Metrics of the engines, and times of the parts of the sync.
    """
    publishing = publish_weights(version)
    receive_sent(version).result()
    handle = next(handle for handle in publishing.result() if handle is not None)
    return sync_metrics(handle, receive_weights(handle).result())


def sync_metrics(handle: "WeightHandle", engines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of a weight sync: those of the engines, and the times of rank 0 and of the slowest engine.

    The times are parts of the phase `sync`, and overlap. They are not phases themselves.
    """
    metrics = engine_metrics(engines)
    times = {f"sync_{part}": seconds for part, seconds in handle.seconds.items()}
    for name in [name for name in metrics if name.startswith("rollout/sync_")]:
        times[name.removeprefix("rollout/")] = metrics.pop(name)
    return metrics | {f"timing_s/{name}": seconds for name, seconds in times.items()}


def engine_metrics(engines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the maximum of each metric over the engines, as `rollout/<name>`."""
    return {f"rollout/{name}": max(metrics[name] for metrics in engines) for name in engines[0]}


def publish_weights(version: int) -> "Future[list[WeightHandle | None]]":
    """Publish the weights of the policy. All ranks take part, and only rank 0 returns a handle."""
    return RoleGroup(Role.ACTOR).call(publish_weights, version)


def receive_sent(version: int) -> Future[list[None]]:
    """Receive the weights in every engine while the ranks gather them, if engines and ranks share devices."""
    return RoleGroup(Role.ROLLOUT).call(receive_sent, version)


def receive_weights(handle: "WeightHandle") -> Future[list[dict[str, float]]]:
    """Load published weights into every engine."""
    return RoleGroup(Role.ROLLOUT).call(receive_weights, handle)


def end_job() -> None:
    """Close the ranks and engines of the policy at the end of the job."""
    wait_all([RoleGroup(role).call(end_job) for role in (Role.ROLLOUT, Role.ACTOR)])


def wait_all(futures: Sequence[Future[Any]]) -> None:
    """Wait for calls that were sent in parallel.

    Raises:
        OSError: the first one that a call raised. It is raised after all calls have ended, so that no worker still
            writes to the folder. Other errors are raised at once.
    """
    failed: list[OSError] = []
    for future in futures:
        try:
            future.result()
        except OSError as error:
            failed.append(error)
    if failed:
        raise failed[0]

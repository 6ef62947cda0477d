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
    announced = announce_weights(version).result()[0]
    publishing = publish_weights(version)
    # Without an announcement the engines read the version once it is published.
    engines = receive_weights(announced or published_handle(publishing)).result()
    handle = published_handle(publishing)
    return sync_metrics(handle, check_engines(engines, RoleGroup(Role.ACTOR), RoleGroup(Role.ROLLOUT)))


def check_engines(
    engines: list[dict[str, float]], actor: RoleGroup[Any], rollout: RoleGroup[Any]
) -> list[dict[str, float]]:
    """Compare what the engines compute with the policy, if a check of an engine is due.

    Args:
        engines: metrics that the engines returned with the newest version. `check_due` requests a check.
        actor: role group of the policy, which still has that version.
        rollout: role group of the engines.

    Returns:
        Metrics of the engines after the check.
    """
    if not any("check_due" in metrics for metrics in engines):
        return engines
    # On request, since a pass of the policy per version would cost 2 % of the demonstration's step.
    probe = actor.call("measure_probe").result()[0]
    checks = rollout.call("check_engine", probe).result()
    joined = [metrics | check for metrics, check in zip(engines, checks, strict=True)]
    return [{name: value for name, value in metrics.items() if name != "check_due"} for metrics in joined]


def sync_metrics(handle: "WeightHandle", engines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of a weight sync: those of the engines, and the times of rank 0 and of the slowest engine.

    The times are parts of the phases `sync` (these overlap) and `generate`. They are not phases themselves.
    """
    times = {f"timing_s/sync_{part}": seconds for part, seconds in handle.seconds.items()}
    return times | engine_metrics(engines)


def engine_metrics(engines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the maximum of each metric over the engines that have it. A name without a prefix gets `rollout/`."""
    names = dict.fromkeys(name for metrics in engines for name in metrics)
    largest = {name: max(metrics[name] for metrics in engines if name in metrics) for name in names}
    return {name if "/" in name else f"rollout/{name}": value for name, value in largest.items()}


def announce_weights(version: int) -> "Future[list[WeightHandle | None]]":
    """Prepare to send a version. Return the handle by which engines receive it, or None if it is not sent."""
    return RoleGroup(Role.ACTOR).call(announce_weights, version)


def publish_weights(version: int, again: "WeightHandle | None" = None) -> "Future[list[WeightHandle | None]]":
    """Publish the weights of the policy. All ranks take part, and only rank 0 returns a handle.

    Args:
        version: number of the version.
        again: handle of an engine that lacks the version; see `FolderCarrier.publish`.
    """
    return RoleGroup(Role.ACTOR).call(publish_weights, version, again)


def published_handle(publishing: "Future[list[WeightHandle | None]]") -> "WeightHandle":
    """Wait for the ranks, and return the handle of rank 0."""
    return next(handle for handle in publishing.result() if handle is not None)


def receive_weights(handle: "WeightHandle") -> Future[list[dict[str, float]]]:
    """Load weights into every engine, either published ones or those that the ranks are sending."""
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

"""Calls that involve several roles, or the whole job. A single role is called through the trainer's role groups."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from core import Future, Role, RoleGroup

if TYPE_CHECKING:
    from components.weights.publisher import WeightHandle


def sync_weights(version: int) -> dict[str, float]:
    """Bring the policy as it is now to every rollout engine; their responses carry `version` from here on. Returns
    metrics of the engines.
    """
    publishing = publish_weights(version)
    receive_sent(version).result()
    handle = next(handle for handle in publishing.result() if handle is not None)
    return engine_metrics(receive_weights(handle).result())


def engine_metrics(engines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of what the engines report the largest numbers."""
    return {f"rollout/{name}": max(own[name] for own in engines) for name in engines[0]}


def publish_weights(version: int) -> "Future[list[WeightHandle | None]]":
    """Write the policy's weights where the engines can read them. All ranks take part; rank 0 holds the handle."""
    return RoleGroup(Role.ACTOR).call(publish_weights, version)


def receive_sent(version: int) -> Future[list[None]]:
    """Let every engine take what the ranks of the policy send while they gather it, where the two share devices."""
    return RoleGroup(Role.ROLLOUT).call(receive_sent, version)


def receive_weights(handle: "WeightHandle") -> Future[list[dict[str, float]]]:
    """Load published weights into every engine."""
    return RoleGroup(Role.ROLLOUT).call(receive_weights, handle)


def end_job() -> None:
    """Tell ranks and engines of the policy that no call will follow."""
    wait_all([RoleGroup(role).call(end_job) for role in (Role.ROLLOUT, Role.ACTOR)])


def wait_all(futures: Sequence[Future[Any]]) -> None:
    """Wait for calls that were sent in parallel; where files could not be read or written, for all of them first."""
    failed: list[OSError] = []
    for future in futures:
        try:
            future.result()
        except OSError as error:
            failed.append(error)
    if failed:
        raise failed[0]

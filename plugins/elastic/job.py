"""Change of a job so that its number of rollout engines can change."""

from __future__ import annotations

from typing import Any

from components.weights.choice import FOLDER_CARRIER
from core import Job, Role
from core.plan import RoleSpec

_WORKER = "training.roles.rollout:RolloutWorker"
_ELASTIC = f"{__name__.rpartition('.')[0]}.worker:ElasticRolloutWorker"


def prepare(job: Job, config: Any) -> list[str]:
    """Prepare a job for `placement.elastic`. Other jobs are left alone.

    Args:
        job: job, whose master and whose class of the rollout engines are changed.
        config: options of the run.

    Returns:
        Lines for the user.

    Raises:
        ValueError: the run cannot work with a changing number of engines.
    """
    if not getattr(config.placement, "elastic", False):
        return []
    from plugins.elastic.master import ElasticMaster

    spec = job.roles.get(Role.ROLLOUT)
    if faults := list(_faults(spec, config)):
        raise ValueError("placement.elastic=true: " + "; ".join(faults))
    assert spec is not None
    spec.entrypoint = _ELASTIC
    job.master = ElasticMaster
    limit = config.elastic.max_engines or "as many as fit"
    return [f"rollout engines can be added and removed (at most {limit}): python scripts/engines.py RUN_DIR add 1"]


def _faults(spec: RoleSpec | None, config: Any) -> list[str]:
    faults: list[str] = []
    if spec is None or not spec.entrypoint.endswith(_WORKER) or spec.process is not None:
        faults.append("the recipe's rollout engines are not processes of their own; leave it out")
    elif (most := config.elastic.max_engines) is not None and most < spec.total:
        faults.append(f"elastic.max_engines={most}, but the run starts with {spec.total}; raise it")
    if config.backend != "ray":
        faults.append(f"backend={config.backend} runs one engine; set backend=ray")
    if config.rollout.weight_sync != FOLDER_CARRIER:
        carrier = config.rollout.weight_sync
        faults.append(
            f"rollout.weight_sync={carrier} counts its readers at the start; set rollout.weight_sync={FOLDER_CARRIER}"
        )
    if config.asynchronous.partial_rollout:
        faults.append("asynchronous.partial_rollout keeps unfinished responses in an engine; set it to false")
    return faults

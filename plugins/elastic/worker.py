"""The role of rollout engines that may join a run after its start."""

from __future__ import annotations

from core import Role, RoleGroup
from training.roles.rollout import RolloutWorker


class ElasticRolloutWorker(RolloutWorker):
    """A rollout engine that requests the current weights before its first work, if it has received none."""

    _has_requested = False

    def _restore_weights(self) -> None:
        # A version that was sent while this engine was starting was not sent to it. The newest version of rank 0 is the
        # version that all other engines have, because the trainer waits for this engine. With a queue of batches the
        # ranks may publish meanwhile. This engine may then have the next version, which it would receive anyway.
        if self.received is None and not self._has_requested:
            self._has_requested = True
            self.received = RoleGroup(Role.ACTOR).call_rank0("newest_weights").result()
        super()._restore_weights()

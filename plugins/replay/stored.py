"""Rollout strategy that reads the rollouts of a recorded run instead of generating them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.batch import Batch
from components.batch.reading import load_batch
from training.run.strategies import GROUPS
from training.tracking.tracker import ROLLOUTS

if TYPE_CHECKING:
    from training.run.policy_run import PolicyRun
    from training.run.queue import Stateful

COMPUTED = (
    *("staleness", "logprob", "reference_logprob", "value", "shaped_reward", "advantage", "return", "correction"),
    *("sampled_mask", "kl"),
)
"""Columns of stored rollouts that a training step has added. A replay computes them again."""
BEFORE_REJECTION = "sampled_mask"
"""Column with the original `action_mask`, if a training step has removed rejected tokens from it."""


class StoredRollouts:
    """Returns the rollouts that a recorded run has stored for each step. It ends the run where the stored steps end."""

    waiting = 0
    has_ended = False

    def __init__(self, run: PolicyRun) -> None:
        self.metrics: Mapping[str, float] = {}
        self._folder = Path(run.config.rollout.replay_from).expanduser()

    def fill(self, step: int) -> Batch | None:
        """See `RolloutStrategy.fill`."""
        path = self._folder / ROLLOUTS.format(step=step)
        return generated_part(load_batch(path)) if path.is_file() else None

    def sources(self) -> Mapping[str, Stateful]:
        """Return a placeholder for responses under way, because the stored rollouts contain them once they end."""
        return {GROUPS: _Placeholder()}


class _Placeholder:
    """Takes the place of a source whose state a replay does not need."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Any, /) -> None:
        """Ignore the state of the recorded run."""


def generated_part(experience: Batch) -> Batch:
    """Return the stored rollouts of a step as they were before its training pass: without the columns in COMPUTED."""
    if BEFORE_REJECTION in experience:
        experience = experience.with_tokens(action_mask=experience[BEFORE_REJECTION])
    return experience.without(*(name for name in COMPUTED if name in experience))

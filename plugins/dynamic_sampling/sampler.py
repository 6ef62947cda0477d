"""Dynamic sampling: fill a step with prompts that have a learning signal, and replace the other prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from components.batch import Batch
from components.rl.advantages import group_std
from components.rl.group_filter import groups_within

if TYPE_CHECKING:
    from components.data.prompts import PromptSource

SAY_EVERY = 10
"""Number of rounds between two progress messages of a step."""


@dataclass(kw_only=True)
class DynamicSampler:
    """Fills each step with prompts that have a learning signal, until the data ends.

    A round never requests more prompts than are missing, so no responses are discarded because a step is full.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2, which samples in rounds of full size instead.
    """

    prompts: PromptSource
    bounds: tuple[float, float] | tuple[None, None]
    """Range of the mean score of a prompt's responses, both ends included. With None, a prompt passes if its scores are
    not all the same.
    """
    option: str
    """Name of the option that sets `bounds`, for messages."""
    passes: int
    """Number of passes over the prompts."""
    minimum: int
    """Minimum number of responses to train on."""
    stopped: Callable[[], bool]
    """Returns True if the run is to stop. Called before each round."""
    info: Callable[[str], None]
    """Prints a line for the user."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step."""
    ended: bool = False
    """True if the last step took all remaining prompts of the data."""

    def fill(self, step: int, count: int, response: Callable[[int], Batch]) -> Batch | None:
        """Return scored responses to `count` prompts that pass.

        At the end of the data there may be fewer prompts. Return None if too few responses are left to train on, or if
        the run is to stop.

        Args:
            step: number of the step.
            count: number of prompts of a full step.
            response: called with a number of prompts; samples and scores responses to the next prompts. Responses whose
                reward failed are left out.

        Raises:
            ValueError: the data ended in the first step, with too few responses to train on.
        """
        before = self.prompts.taken
        parts: list[Batch] = []
        kept = 0
        while kept < count and (left := self.prompts.left(self.passes)) and not self.stopped():
            part = self._passing(response(min(count - kept, left)))
            kept += len(part["prompt_id"].unique())
            parts.append(part)
            if len(parts) % SAY_EVERY == 0 and kept < count:
                tried = self.prompts.taken - before
                left = self.prompts.left(self.passes)
                self.info(f"step {step}: {kept} of {count} prompts pass, after {tried} were tried; {left} are left")
        # Prompts tried, including those that were replaced.
        seen = self.prompts.taken - before
        self.metrics = {
            "rollout/filter_pass_rate": kept / max(seen, 1),
            "rollout/filter_prompts_seen": float(seen),
            "rollout/filter_rounds": float(len(parts)),
        }
        if kept < count and self.stopped():
            self.prompts.taken = before  # a resumed run samples the same responses again
            return None
        if kept == count:
            return Batch.concat(parts)
        self.ended = True
        return self._last_batch(step, seen, kept, parts)

    def _last_batch(self, step: int, seen: int, kept: int, parts: list[Batch]) -> Batch | None:
        """Return the batch of a step that the data could not fill, or None if it has too few responses."""
        low, high = self.bounds
        condition = f"a mean score in {low} to {high}"
        if low is None:
            condition = "scores that differ"
        passed = f"of the last {seen} prompts, {kept} have {condition}"
        # Without a passing prompt the parts are empty, or there are none.
        if kept and len(batch := Batch.concat(parts)) >= self.minimum:
            self.info(f"the data ends: {passed}")
            return batch
        # A later step may end the run normally. In the first one, nothing would ever be trained.
        if step == 1:
            raise ValueError(f"{passed}: nothing to train on; set {self.option}, or other prompts")
        self.info(f"the data ends: {passed}, too few to train on")
        return None

    def _passing(self, responses: Batch) -> Batch:
        """Select the responses of the prompts that pass."""
        low, high = self.bounds
        scores = responses["score"], responses["prompt_id"]
        if low is None or high is None:
            return responses.select(group_std(*scores) > 0)
        return responses.select(groups_within(*scores, low, high))

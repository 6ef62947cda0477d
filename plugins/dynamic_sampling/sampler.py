"""Dynamic sampling: fill a step with prompts that teach something, and ask for others in place of those that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from components.batch import Batch
from components.rl.advantages import group_std
from components.rl.rewards import groups_within

if TYPE_CHECKING:
    from components.data.prompts import PromptSource

SAY_EVERY = 10
"""Of so many rounds, one says how far a step is."""


@dataclass(kw_only=True)
class DynamicSampler:
    """Fills each step with prompts that teach something, to the end of the data.

    A round never asks for more prompts than are missing, so there is no surplus to throw away.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2, which samples in rounds of full size instead.
    """

    prompts: PromptSource
    bounds: tuple[float, float] | tuple[None, None]
    """The mean score of a prompt's responses is between these. None: the scores are not all the same, whatever they
    are.
    """
    option: str
    """How the user calls the two."""
    passes: int
    """How often the prompts are gone through."""
    minimum: int
    """Minimum number of responses to train on."""
    stopped: Callable[[], bool]
    """Whether the run is to stop; asked before each round."""
    info: Callable[[str], None]
    """Shows a line to the user."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step."""
    ended: bool = False
    """Whether the last step took all that the data had left."""

    def fill(self, step: int, wanted: int, response: Callable[[int], Batch]) -> Batch | None:
        """Scored responses to `wanted` prompts that pass; fewer where the data end, and None where too few are left, or
        the run is to stop.

        Args:
            step: its number.
            wanted: prompts of a full step.
            response: makes and scores the responses to the next so many prompts, without those whose reward failed.

        Raises:
            ValueError: the data end before there was anything to train on.
        """
        before = self.prompts.taken
        parts: list[Batch] = []
        kept = 0
        while kept < wanted and (left := self.prompts.left(self.passes)) and not self.stopped():
            part = self._that_teach(response(min(wanted - kept, left)))
            kept += len(part["prompt_id"].unique())
            parts.append(part)
            if len(parts) % SAY_EVERY == 0 and kept < wanted:
                tried, left = self.prompts.taken - before, self.prompts.left(self.passes)
                self.info(f"step {step}: {kept} of {wanted} prompts pass, after {tried} were tried; {left} are left")
        seen = self.prompts.taken - before
        self.metrics = {
            "rollout/filter_pass_rate": kept / max(seen, 1),
            "rollout/filter_prompts_seen": float(seen),
            "rollout/filter_rounds": float(len(parts)),
        }
        if kept < wanted and self.stopped():
            self.prompts.taken = before  # the same responses are made again when the run continues
            return None
        batch = Batch.concat(parts) if kept else None
        if kept == wanted:
            return batch
        self.ended = True
        enough = batch is not None and len(batch) >= self.minimum
        low, high = self.bounds
        wanted_scores = "scores that differ" if low is None else f"a mean score in {low} to {high}"
        passed = f"of the last {seen} prompts, {kept} have {wanted_scores}"
        if step == 1 and not enough:
            raise ValueError(f"{passed}: nothing to train on; set {self.option}, or other prompts")
        self.info(f"the data ends: {passed}" + ("" if enough else ", too few to train on"))
        return batch if enough else None

    def _that_teach(self, responses: Batch) -> Batch:
        """Select the responses of the prompts that pass."""
        low, high = self.bounds
        scores = responses["score"], responses["prompt_id"]
        passes_B = group_std(*scores) > 0 if low is None or high is None else groups_within(*scores, low, high)
        return responses.select(passes_B)

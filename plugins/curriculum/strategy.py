"""Rollout strategy that draws the prompts of each step by their difficulty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from components.data.samples import main_branches
from plugins.curriculum.difficulty import Difficulty

if TYPE_CHECKING:
    from components.batch import Batch
    from training.run.policy_run import PolicyRun
    from training.run.queue import Stateful


class Curriculum:
    """Draws prompts by the mean score of their responses so far. See `RolloutStrategy`."""

    waiting = 0
    has_ended = False

    def __init__(self, run: PolicyRun) -> None:
        config = run.config
        self._run = run
        self._options = vars(config)["curriculum"]
        self._by_variance = config.data.curriculum == "variance"
        self._rows = np.flatnonzero(run.prompts.kept)
        self._difficulty = Difficulty.of(len(run.prompts.rows), self._options.decay)
        if config.prompts_per_step > len(self._rows):
            raise ValueError(
                f"prompts_per_step={config.prompts_per_step}, but data.curriculum draws different prompts for a step, "
                f"and there are {len(self._rows)}; lower it"
            )
        run.prompts.picker = self._pick
        self.metrics: Mapping[str, float] = {}

    def sources(self) -> Mapping[str, Stateful]:
        """See `RolloutStrategy.sources`."""
        return {"curriculum": self._difficulty}

    def fill(self, step: int) -> Batch:
        """See `RolloutStrategy.fill`."""
        rollouts = self._run.respond_to_next(self._run.config.prompts_per_step, step)
        scores: dict[int, list[float]] = {}
        # Each branch of an episode has the score of the episode, which counts once.
        samples = main_branches(rollouts)
        for prompt_id, score in zip(samples["prompt_id"].tolist(), samples["score"].tolist(), strict=True):
            scores.setdefault(prompt_id % len(self._run.prompts.rows), []).append(score)
        # A prompt whose rewards all failed is not in the rollouts, and stays as it was.
        for row, of_row in scores.items():
            self._difficulty.update(row, sum(of_row) / len(of_row))
        is_seen = self._difficulty.visits[self._rows] > 0
        mean = self._difficulty.mean[self._rows][is_seen]
        self.metrics = {
            "rollout/seen_share": float(is_seen.mean()),
            "rollout/seen_variance": float((mean * (1 - mean)).sum() / max(len(mean), 1)),
        }
        return rollouts

    def _pick(self, numbers: range) -> list[tuple[int, int]]:
        """Draw prompts. The random numbers follow from the seed and the number of prompts taken so far."""
        rng = np.random.default_rng([self._run.config.seed, 2, numbers.start])
        difficulty = self._difficulty
        if self._by_variance:
            rows = difficulty.draw_by_variance(self._rows, len(numbers), self._options.floor, rng)
        else:
            rows = difficulty.draw_from_pools(self._rows, len(numbers), self._options.shares, rng)
        # The visit as the epoch: a prompt that is drawn again has another id.
        return [(int(difficulty.visits[row]), row) for row in rows]

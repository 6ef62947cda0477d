"""Difficulty of each prompt, and the draw of prompts by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

UNSEEN = 0.25
"""Weight of a prompt that was never drawn: the largest possible p (1 - p), so that each prompt is tried early."""
EASY = 2 / 3
"""Mean score above which a prompt is easy."""
HARD = 1 / 3
"""Mean score below which a prompt is hard."""


@dataclass
class Difficulty:
    """Visits and mean score of each row of the data."""

    visits: np.ndarray
    """[rows] int64, number of steps that had the prompt."""
    mean: np.ndarray
    """[rows] float64, decayed mean score from 0 to 1. 0 before the first visit."""
    decay: float
    """Weight of the previous mean at a further visit."""

    @classmethod
    def of(cls, rows: int, decay: float) -> Difficulty:
        """Return the state of a new run."""
        return cls(np.zeros(rows, dtype=np.int64), np.zeros(rows), decay)

    def update(self, row: int, score: float) -> None:
        """Record the mean score of the responses to a prompt in a step."""
        score = min(max(score, 0.0), 1.0)
        if self.visits[row]:
            score = self.decay * float(self.mean[row]) + (1 - self.decay) * score
        self.mean[row] = score
        self.visits[row] += 1

    def draw_by_variance(self, rows: np.ndarray, count: int, floor: float, rng: np.random.Generator) -> list[int]:
        """Draw different rows in proportion to p (1 - p).

        Args:
            rows: rows to draw from.
            count: number of rows to draw, at most their number.
            floor: minimum weight.
            rng: source of random numbers.
        """
        mean = self.mean[rows]
        weight = np.where(self.visits[rows] == 0, UNSEEN, np.maximum(mean * (1 - mean), floor))
        # Exponential keys: the rows with the largest ones are a draw without replacement. A weight of 0 comes last.
        with np.errstate(divide="ignore"):
            keys = np.log(rng.random(len(rows))) / weight
        return rows[np.argsort(-keys, kind="stable")[:count]].tolist()

    def draw_from_pools(
        self, rows: np.ndarray, count: int, shares: Sequence[float], rng: np.random.Generator
    ) -> list[int]:
        """Draw different rows, with fixed shares of easy, middle and hard ones. Missing ones come from all pools."""
        rows = rng.permutation(rows)
        mean = self.mean[rows]
        is_seen = self.visits[rows] > 0
        is_easy = is_seen & (mean > EASY)
        is_hard = is_seen & (mean < HARD)
        pools = [rows[is_easy], rows[~is_easy & ~is_hard], rows[is_hard]]
        edges = np.round(np.cumsum([0.0, *shares]) * count).astype(int)
        drawn: list[int] = []
        for pool, size in zip(pools, np.diff(edges), strict=True):
            drawn += pool[:size].tolist()
        taken = set(drawn)
        return drawn + [row for row in rows.tolist() if row not in taken][: count - len(drawn)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, of the rows that were drawn."""
        rows = np.flatnonzero(self.visits)
        # Python writes a float with the digits that restore it exactly.
        return {"rows": rows.tolist(), "visits": self.visits[rows].tolist(), "mean": self.mean[rows].tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore visits and mean scores."""
        self.visits[:] = 0
        self.mean[:] = 0
        self.visits[state["rows"]] = state["visits"]
        self.mean[state["rows"]] = state["mean"]

"""What several responses to each held-out prompt are worth together: their mean, the best, the worst, the majority.

B responses; of one prompt n responses, R draws of k of them. Nothing here needs torch: tensors are only read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

DRAWS = 1000
"""So often are k responses drawn."""
SEED = 42
"""Of the draws: the same responses have the same metrics in every run."""
CORE = ("mean", "best", "maj")
"""Of the most responses there are, these say how good a policy is; all else is told beside them."""


def validation_metrics(
    reward_B: Tensor,
    prompt_B: Tensor,
    sources: Sequence[str],
    logged: Mapping[str, Tensor] | None = None,
    predictions: Sequence[Hashable] | None = None,
) -> dict[str, float]:
    """What n responses to each held-out prompt, of all as many, are worth, under the names that verl gives it.

    Each is worked out for one prompt, and the mean over a source's prompts is shown. For k = 2, 4, 8, ..., n the
    responses are drawn 1000 times with replacement (a bootstrap), k at a time. So `best@n` is less than what all n
    reach together, which is `pass{n}` of `heldout_metrics`.

    Args:
        reward_B: [B] reward of each response.
        prompt_B: [B] integers, equal for the responses to one prompt of a source, in any order.
        sources: of length B, the source of each response's prompt.
        logged: further numbers, each [B]; NaN where a response has none, and the others of its prompt are drawn from.
        predictions: of length B, what each response says; equal ones vote for the same, None for having said nothing. A
            source whose responses are all None has no majority.

    Returns:
        `{section}/{source}/{variable}/{metric}`. The variable is `reward`, or the name of a logged number. The metric
        is `mean@n`, and for n > 1 `std@n` over a prompt's responses (population), and of the draws the mean and the
        standard deviation: `best@k/mean`, `best@k/std`, `worst@k/...`, and `maj@k/...`, the value of the first response
        that says what most of those drawn say; of two that are said equally often, what was drawn first. The section
        is `val-core` for the mean, best and majority of n responses of `acc`, or of `reward` in a source where no `acc`
        is logged; and `val-aux` for all else.
    """
    columns = {**(logged or {}), "reward": reward_B}
    rows_of: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, key in enumerate(zip(sources, prompt_B.tolist(), strict=True)):
        rows_of[key].append(i)
    n = len(next(iter(rows_of.values())))
    values = {name: np.asarray(x_B.tolist(), dtype=np.float64) for name, x_B in columns.items()}
    metrics: dict[str, float] = {}
    for source in sorted(set(sources)):
        prompts = [rows for (of, _), rows in rows_of.items() if of == source]
        said = [[predictions[i] for i in rows] for rows in prompts] if predictions is not None else []
        votes = [_votes(each) for each in said] if any(set(each) != {None} for each in said) else None
        found = {name: _of_source([x_B[rows] for rows in prompts], votes, n) for name, x_B in values.items()}
        core = "acc" if found.get("acc") else "reward"
        for name, own in found.items():
            for metric, value in own.items():
                is_core = name == core and metric.startswith(CORE) and metric.split("/")[0].endswith(f"@{n}")
                metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = value
    return metrics


def majority(value_kR: np.ndarray, vote_kR: np.ndarray) -> np.ndarray:
    """[R] the value of the first response of each draw that votes as most of the draw do; of equally many votes, the
    first drawn counts.

    Args:
        value_kR: [k, R] what each response is worth.
        vote_kR: [k, R] small integers from 0, equal where responses say the same.
    """
    draw_R = np.arange(vote_kR.shape[1])
    place_kR = vote_kR * len(draw_R) + draw_R
    count_kR = np.bincount(place_kR.ravel())[place_kR]
    return value_kR[count_kR.argmax(0), draw_R]


def _of_source(values: list[np.ndarray], votes: list[np.ndarray] | None, n: int) -> dict[str, float]:
    """Means over the prompts of a source; empty where none of its responses has a value."""
    found: dict[str, list[float]] = defaultdict(list)
    for i, value_n in enumerate(values):
        there_n = ~np.isnan(value_n)
        if there_n.any():
            vote_n = None if votes is None else votes[i][there_n]
            for name, value in _of_prompt(value_n[there_n], vote_n, n).items():
                found[name].append(value)
    return {name: float(np.mean(each)) for name, each in found.items()}


def _of_prompt(value_n: np.ndarray, vote_n: np.ndarray | None, n: int) -> dict[str, float]:
    found = {f"mean@{n}": float(value_n.mean())}
    if n == 1:
        return found
    found[f"std@{n}"] = float(value_n.std())
    for k in [*(2**i for i in range(1, (n - 1).bit_length())), n]:
        drawn_kR = _draws(len(value_n), k)
        value_kR = value_n[drawn_kR]
        kept = {"best": value_kR.max(0), "worst": value_kR.min(0)}
        if vote_n is not None:
            kept["maj"] = majority(value_kR, vote_n[drawn_kR])
        for name, value_R in kept.items():
            found[f"{name}@{k}/mean"] = float(value_R.mean())
            found[f"{name}@{k}/std"] = float(value_R.std())
    return found


@lru_cache(maxsize=64)
def _draws(n: int, k: int) -> np.ndarray:
    """[k, R] which of n responses are drawn. The same for every prompt."""
    return np.random.default_rng([SEED, n, k]).integers(0, n, (k, DRAWS))


def _votes(predictions: Sequence[Hashable]) -> np.ndarray:
    """[n] integers from 0, equal where predictions are."""
    numbers = {prediction: i for i, prediction in enumerate(dict.fromkeys(predictions))}
    return np.asarray([numbers[prediction] for prediction in predictions])

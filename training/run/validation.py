"""Metrics of several responses per held-out prompt: mean, best, worst and majority.

B: number of responses. n: number of responses of a prompt. R: number of draws of k responses. This module does not
import torch: it only reads tensors.
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
"""Number of times that k responses are drawn."""
SEED = 42
"""Seed of the draws. It is fixed, so that the same responses have the same metrics in every run."""
CORE = ("mean", "best", "maj")
"""Metrics that are reported in the section `val-core` when they are computed over all n responses."""


def validation_metrics(
    reward_B: Tensor,
    prompt_B: Tensor,
    sources: Sequence[str],
    logged: Mapping[str, Tensor] | None = None,
    predictions: Sequence[Hashable] | None = None,
) -> dict[str, float]:
    """Return metrics of n responses per held-out prompt, named as in verl. All prompts have n responses.

    Each metric is computed per prompt and averaged over the prompts of a source. For k = 2, 4, 8, ..., n the responses
    are drawn 1000 times with replacement (bootstrap), k at a time. `best@n` is therefore lower than the best of all n
    responses, which is `pass{n}` of `heldout_metrics`.

    Args:
        reward_B: [B] reward of each response.
        prompt_B: [B] integers, equal for the responses to one prompt of a source, in any order.
        sources: source of each response's prompt, of length B.
        logged: additional values by name, each [B]. A response without a value has NaN, and the draws are from the
            other responses of its prompt.
        predictions: answer of each response, of length B. Equal answers vote for the same; None is a response without
            an answer. A source whose answers are all None has no majority.

    Returns:
        `{section}/{source}/{variable}/{metric}`. The variable is `reward` or the name of a logged value. The metric is
        `mean@n`, and for n > 1 `std@n`, the population standard deviation over the responses of a prompt, and the mean
        and standard deviation over the draws: `best@k/mean`, `best@k/std`, `worst@k/...` and `maj@k/...`. The majority
        is the value of the first response with the most frequent answer of the draw; of equally frequent answers, the
        one drawn first counts. The section is `val-core` for mean, best and majority over n responses of `acc`, or of
        `reward` for a source without `acc`. All other metrics are in `val-aux`.
    """
    columns = {**(logged or {}), "reward": reward_B}
    rows_of: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, key in enumerate(zip(sources, prompt_B.tolist(), strict=True)):
        rows_of[key].append(i)
    n = len(next(iter(rows_of.values())))
    values = {name: np.asarray(x_B.tolist(), dtype=np.float64) for name, x_B in columns.items()}
    metrics: dict[str, float] = {}
    for source in sorted(set(sources)):
        prompts = [rows for (prompt_source, _), rows in rows_of.items() if prompt_source == source]
        answers = [[predictions[i] for i in rows] for rows in prompts if predictions is not None]
        votes = None
        # A source without any answer has no majority. Its responses would else all vote for the same missing answer.
        if any(set(each) != {None} for each in answers):
            votes = list(map(_votes, answers))
        by_variable = {name: _of_source([x_B[rows] for rows in prompts], votes, n) for name, x_B in values.items()}
        core = "reward"
        # As in verl: a source whose reward logs an accuracy is judged by it.
        if by_variable.get("acc"):
            core = "acc"
        for name, variable_metrics in by_variable.items():
            for metric, value in variable_metrics.items():
                section = "val-aux"
                if name == core and metric.startswith(CORE) and metric.split("/")[0].endswith(f"@{n}"):
                    section = "val-core"
                metrics[f"{section}/{source}/{name}/{metric}"] = value
    return metrics


def majority(value_kR: np.ndarray, vote_kR: np.ndarray) -> np.ndarray:
    """Return the value of the first response with the most votes of each draw, [R]. The first drawn wins a tie.

    Args:
        value_kR: [k, R] value of each response.
        vote_kR: [k, R] small integers from 0, equal for equal answers.
    """
    draw_R = np.arange(vote_kR.shape[1])
    place_kR = vote_kR * len(draw_R) + draw_R
    count_kR = np.bincount(place_kR.ravel())[place_kR]
    return value_kR[count_kR.argmax(0), draw_R]


def _of_source(values: list[np.ndarray], votes: list[np.ndarray] | None, n: int) -> dict[str, float]:
    """Return means over the prompts of a source. Empty if none of its responses has a value."""
    values_by_metric: dict[str, list[float]] = defaultdict(list)
    for i, value_n in enumerate(values):
        has_value_n = ~np.isnan(value_n)
        if has_value_n.any():
            # Answers of responses without a value do not vote, since the draws do not include these responses.
            vote_n = None
            if votes is not None:
                vote_n = votes[i][has_value_n]
            for name, value in _of_prompt(value_n[has_value_n], vote_n, n).items():
                values_by_metric[name].append(value)
    return {name: float(np.mean(metric_values)) for name, metric_values in values_by_metric.items()}


def _of_prompt(value_n: np.ndarray, vote_n: np.ndarray | None, n: int) -> dict[str, float]:
    metrics = {f"mean@{n}": float(value_n.mean())}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(value_n.std())
    # Powers of 2 below n, and n itself, as in verl, so that the curves of both systems can be compared.
    for k in [*(2**i for i in range(1, (n - 1).bit_length())), n]:
        drawn_kR = _draws(len(value_n), k)
        value_kR = value_n[drawn_kR]
        kept = {"best": value_kR.max(0), "worst": value_kR.min(0)}
        if vote_n is not None:
            kept["maj"] = majority(value_kR, vote_n[drawn_kR])
        for name, value_R in kept.items():
            metrics[f"{name}@{k}/mean"] = float(value_R.mean())
            metrics[f"{name}@{k}/std"] = float(value_R.std())
    return metrics


@lru_cache(maxsize=64)
def _draws(n: int, k: int) -> np.ndarray:
    """Return indices [k, R] of the responses drawn from n. They are the same for every prompt."""
    return np.random.default_rng([SEED, n, k]).integers(0, n, (k, DRAWS))


def _votes(predictions: Sequence[Hashable]) -> np.ndarray:
    """Return integers [n] from 0 that are equal for equal predictions."""
    numbers = {prediction: i for i, prediction in enumerate(dict.fromkeys(predictions))}
    return np.asarray([numbers[prediction] for prediction in predictions])

"""Metrics of the responses to held-out prompts, and the metric that decides the best step.

B: number of responses. This module does not import torch: it only reads tensors.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def heldout_metrics(
    score_B: Tensor,
    prompt_B: Tensor,
    sources: Sequence[str],
    response_length_B: Tensor,
    truncated_B: Tensor,
    logged: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Return scores and lengths of the responses to held-out prompts, per source and over all sources.

    There must be at least one response. Prompts may have different numbers of responses, because those whose reward
    failed are missing.

    Args:
        score_B: [B] score of each response.
        prompt_B: [B] integers, equal for the responses to one prompt of a source, in any order.
        sources: source of each response's prompt, of length B.
        response_length_B: [B] number of tokens of each response.
        truncated_B: [B] bool, True if a response was cut off.
        logged: additional values by name, each [B]. NaN if a response has none.

    Returns:
        Over all sources: `score`, the mean over the responses; `pass{n}`, the mean over the prompts of the best score,
        where n > 1 is the maximum number of responses of a prompt; `response_length_mean` in tokens; `truncated_rate`;
        and `num_samples`, which is B. Per source s, in alphabetical order: all of these except `num_samples`, such as
        `{s}_score`, and `{s}_{name}`, the mean of each logged value.
    """
    scores = score_B.tolist()
    lengths = response_length_B.tolist()
    truncated = [float(cut) for cut in truncated_B.tolist()]
    by_prompt: dict[tuple[str, int], list[float]] = defaultdict(list)
    by_source: dict[str, list[int]] = defaultdict(list)
    for i, (source, prompt) in enumerate(zip(sources, prompt_B.tolist(), strict=True)):
        # Prompts of two sources may have the same number.
        by_prompt[source, prompt].append(scores[i])
        by_source[source].append(i)
    # The maximum, because a prompt with a failed reward has fewer responses. The name pass{n} must not depend on that.
    n = max(map(len, by_prompt.values()))
    metrics = {"score": fmean(scores)}
    if n > 1:
        metrics[f"pass{n}"] = fmean(map(max, by_prompt.values()))
    for source in sorted(by_source):
        rows = by_source[source]
        # Added first, so that a logged value named "score" cannot overwrite the score of the source.
        # A mean over no value is NaN. It is left out, since a metric that is NaN looks like a diverged run.
        means = {f"{source}_{name}": float(x_B[rows].float().nanmean()) for name, x_B in (logged or {}).items()}
        metrics |= {name: value for name, value in means.items() if not math.isnan(value)}
        metrics[f"{source}_score"] = fmean(scores[i] for i in rows)
        if n > 1:
            best = (max(responses) for (prompt_source, _), responses in by_prompt.items() if prompt_source == source)
            metrics[f"{source}_pass{n}"] = fmean(best)
        metrics[f"{source}_response_length_mean"] = fmean(lengths[i] for i in rows)
        metrics[f"{source}_truncated_rate"] = fmean(truncated[i] for i in rows)
    over_all = {"response_length_mean": fmean(lengths), "truncated_rate": fmean(truncated)}
    return metrics | over_all | {"num_samples": float(len(scores))}


def best_metric(metrics: Mapping[str, float], key: str) -> tuple[str, float] | None:
    """Return name and value of the metric that decides the best step.

    Args:
        metrics: metrics of `heldout_metrics`.
        key: name of the metric. It may start with "eval/" or "eval_", and "_pass1" is accepted for "_score", as in
            OpenRLHF. "" selects the score. "none" marks no step as the best.

    Returns:
        The metric, or None for "none".

    Raises:
        ValueError: there is no such metric.
    """
    if key == "none":
        return None
    plain = key.removeprefix("eval/").removeprefix("eval_") or "score"
    names = (key, plain, re.sub("_pass1$", "_score", plain))
    name = next((name for name in names if name in metrics), None)
    if name is None:
        raise ValueError(
            f"no metric {key or plain!r} to find the best step by; set one of {sorted(metrics)}, '' for score, or "
            "'none'"
        )
    return name, metrics[name]

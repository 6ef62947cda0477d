"""What responses to held-out prompts say about a policy, and which of these numbers decides what is best.

B responses. Nothing here needs torch: tensors are only read.
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
    """Scores and lengths of the responses to held-out prompts, by the source of the prompt and over all. There is at
    least one; where rewards have failed, prompts may have fewer than others.

    Args:
        score_B: [B] score of each response.
        prompt_B: [B] integers, equal for the responses to one prompt of a source, in any order.
        sources: of length B, the source of each response's prompt.
        response_length_B: [B] tokens of each response.
        truncated_B: [B] bool, True where a response was cut off.
        logged: further numbers, each [B]; NaN where a response has none.

    Returns:
        Over all `score`, the mean over the responses, and for n > 1, the most responses that a prompt has, `pass{n}`,
        the mean over the prompts of the best score; `response_length_mean` in tokens, `truncated_rate`, and
        `num_samples`, B. The same but the last of each source s, in the order of their names, as `{s}_score`, and
        `{s}_{name}`, the mean of each logged number that is there.
    """
    scores, lengths = score_B.tolist(), response_length_B.tolist()
    truncated = [float(cut) for cut in truncated_B.tolist()]
    by_prompt: dict[tuple[str, int], list[float]] = defaultdict(list)
    by_source: dict[str, list[int]] = defaultdict(list)
    for i, (source, prompt) in enumerate(zip(sources, prompt_B.tolist(), strict=True)):
        by_prompt[source, prompt].append(scores[i])
        by_source[source].append(i)
    n = max(map(len, by_prompt.values()))
    metrics = {"score": fmean(scores)}
    if n > 1:
        metrics[f"pass{n}"] = fmean(map(max, by_prompt.values()))
    for source in sorted(by_source):
        rows = by_source[source]
        # First, so that a logged number called score does not take the place of ours.
        means = {f"{source}_{name}": float(x_B[rows].float().nanmean()) for name, x_B in (logged or {}).items()}
        metrics |= {name: value for name, value in means.items() if not math.isnan(value)}
        metrics[f"{source}_score"] = fmean(scores[i] for i in rows)
        if n > 1:
            best = (max(responses) for (of, _), responses in by_prompt.items() if of == source)
            metrics[f"{source}_pass{n}"] = fmean(best)
        metrics[f"{source}_response_length_mean"] = fmean(lengths[i] for i in rows)
        metrics[f"{source}_truncated_rate"] = fmean(truncated[i] for i in rows)
    over_all = {"response_length_mean": fmean(lengths), "truncated_rate": fmean(truncated)}
    return metrics | over_all | {"num_samples": float(len(scores))}


def best_metric(metrics: Mapping[str, float], key: str) -> tuple[str, float] | None:
    """Name and value of the metric that decides which step is the best.

    Args:
        metrics: of `heldout_metrics`.
        key: a name, which may start with "eval/" or "eval_", and end in "_pass1" for "_score", as OpenRLHF has it; "":
            score; "none": no step is the best.

    Returns:
        None for "none".

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

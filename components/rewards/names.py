"""Names of metrics from reward code: unique, and different from the run's own metrics."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable

RUN_NAMES = re.compile(
    r"reward|score|shaped|failed|group_std|zero_variance_share"  # rewards of a step
    r"|pass\d+|response_length_mean|truncated_rate"  # an evaluation, by source
    r"|model(_\d+)?|function|overlong(_reward)?"  # parts of rewards that recipes log
)
"""Names of the run's own metrics after `reward/`, and after the source in `eval/`."""
PREFIX = "log_"
"""Prefix of metrics whose name the run uses itself."""

_log = logging.getLogger(__name__)


def metric_names(logged: Iterable[str], *, warns: bool = True) -> dict[str, str]:
    """Return the name of the metric of each number that reward code or an environment logs.

    The prefix `log_` is added to names that the run uses itself: `score` becomes `log_score`.

    Args:
        logged: names that are logged.
        warns: log a warning the first time a name is changed. False if the caller informs the user.
    """
    # The user's unchanged names are reserved first, so that a renamed one never takes another's name.
    names = list(logged)
    taken = {name for name in names if not RUN_NAMES.fullmatch(name)}
    metrics: dict[str, str] = {}
    for name in names:
        metric = name
        if name not in taken:
            metric = PREFIX + name
            while metric in taken:
                metric = PREFIX + metric
            taken.add(metric)
            if warns:
                _warn_renamed(name, metric)
        metrics[name] = metric
    return metrics


@functools.cache
def _warn_renamed(name: str, metric: str) -> None:
    _log.warning("the reward logs %r, which is a metric of the run: it is renamed to %s", name, metric)

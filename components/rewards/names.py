"""Names of metrics from reward code: unique, and different from the run's own metrics."""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from components.rewards.base import FUNCTION_NAMES, is_reward_file, reward_function
from components.rewards.servers import is_server

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


def part_names(specs: Sequence[str]) -> list[str]:
    """Return the name of each part of a weighted sum in logs.

    It is the name of the function or the scorer, or the host and path of the server. A function with one of the usual
    names (`FUNCTION_NAMES`) gets the name of its file. If functions of several files have the same name, or a name that
    the run uses, the name of the file is put before it. Equal names are then numbered in the order of the sum.
    """
    names = [_part_name(spec) for spec in specs]
    counts = Counter(names)
    for i, name in enumerate(names):
        if counts[name] > 1 or RUN_NAMES.fullmatch(name):
            names[i] = _with_file(specs[i], name)
    unique: list[str] = []
    for name in names:
        number = 1
        candidate = name
        # A numbered name must not be the name of another part, such as a function that is called style_2.
        while candidate in unique or (number > 1 and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def _part_name(spec: str) -> str:
    if is_server(spec):
        # Several URLs are copies of one server, so the first one names the part.
        url = urlsplit(spec.partition(",")[0])
        return _plain(f"{url.hostname}{url.path}")
    if not is_reward_file(spec):
        return _plain(spec)
    path, name = reward_function(spec)
    return _plain(path.stem) if name in FUNCTION_NAMES else name


def _with_file(spec: str, name: str) -> str:
    if not is_reward_file(spec):
        return name
    stem = _plain(Path(spec.rpartition(".py")[0]).name)
    return name if stem == name else f"{stem}_{name}"


def _plain(text: str) -> str:
    """Replace all characters but letters, digits and underscores by underscores."""
    return re.sub(r"\W+", "_", text).strip("_")

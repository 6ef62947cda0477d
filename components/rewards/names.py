"""Names of metrics that come from reward code: unique, and different from those that a run gives its own metrics."""

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
    r"reward|score|shaped|failed|group_std|zero_variance_share"  # of a step's rewards
    r"|pass\d+|response_length_mean|truncated_rate"  # of an evaluation, by source
    r"|model(_\d+)?|function|overlong(_reward)?"  # parts that recipes log themselves
)
"""Names after `reward/`, and after the source in `eval/`, that a run gives its own metrics."""
PREFIX = "log_"
"""Put before a name that the run uses itself."""

_log = logging.getLogger(__name__)


def metric_names(logged: Iterable[str], *, warns: bool = True) -> dict[str, str]:
    """Return the name of the metric of each number that reward code or an environment logs.

    A name of the run's own is prefixed with `log_`: `score` becomes `log_score`. The first time this is a warning,
    unless the caller tells the user (`warns`).
    """
    names = list(logged)
    taken = {name for name in names if not RUN_NAMES.fullmatch(name)}
    found: dict[str, str] = {}
    for name in names:
        metric = name
        if name not in taken:
            metric = PREFIX + name
            while metric in taken:
                metric = PREFIX + metric
            taken.add(metric)
            if warns:
                _warn_renamed(name, metric)
        found[name] = metric
    return found


@functools.cache
def _warn_renamed(name: str, metric: str) -> None:
    _log.warning("the reward logs %r, which the run logs itself: it is renamed %s", name, metric)


def part_names(specs: Sequence[str]) -> list[str]:
    """Return the name of each part of a weighted sum in logs.

    It is the function's, the scorer's, or the server's host and path. A function with one of the usual names
    (`FUNCTION_NAMES`) is called by its file. Functions of several files that have the same name, or a name that the run
    uses, get their file's before it; what is still the same is numbered in the order of the sum.
    """
    plain = [_part_name(spec) for spec in specs]
    counts = Counter(plain)
    names = [
        _with_file(spec, name) if counts[name] > 1 or RUN_NAMES.fullmatch(name) else name
        for spec, name in zip(specs, plain)
    ]
    unique: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in unique or (number > 1 and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def _part_name(spec: str) -> str:
    if is_server(spec):
        url = urlsplit(spec.partition(",")[0])
        return _plain(f"{url.hostname}{url.path}")
    if not is_reward_file(spec):
        return _plain(spec)
    path, name = reward_function(spec)
    return _plain(path.stem) if name in FUNCTION_NAMES else name


def _with_file(spec: str, name: str) -> str:
    stem = _plain(Path(spec.rpartition(".py")[0]).name) if is_reward_file(spec) else name
    return name if stem == name else f"{stem}_{name}"


def _plain(text: str) -> str:
    """Replace what no name of a metric should hold."""
    return re.sub(r"\W+", "_", text).strip("_")

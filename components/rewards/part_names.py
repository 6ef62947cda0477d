"""Names of the parts of a weighted sum of rewards in logs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from components.rewards.base import is_reward_file
from components.rewards.files import FUNCTION_NAMES, reward_function
from components.rewards.names import RUN_NAMES
from components.rewards.servers import is_server


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

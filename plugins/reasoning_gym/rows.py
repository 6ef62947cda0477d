"""Prompts from the tasks of reasoning-gym, by name.

They are drawn in a child process. The questions of some tasks depend on the order of Python's sets, which differs
between processes unless it is fixed before a process starts. A resumed run would not draw the same prompts again. The
child process also gives the drawing a deadline, and keeps the imports of the library out of the caller.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from components.data.sources import MAX_MISSES, DataSource, Split, is_heldout
from components.process.child_process import Child, run_child, serve_calls
from components.rewards.scorers import get_scorer
from plugins.reasoning_gym.scorer import make_label

PREFIX = "reasoning_gym:"
"""Prefix of the name of a data source in messages."""
SCORER = "reasoning_gym"

DRAW_LIMIT_S = 600.0
"""Time limit of a request in seconds. A few tasks need more than a second for one question."""
REPORT_EVERY_S = 20.0
FIRST_CHUNK = 64
"""Number of questions of the first data set that is created for a task. Each further data set has twice as many."""
LAST_CHUNK = 4096
"""Maximum number of questions of a data set."""

REFUSED = {
    "composite": "it mixes other tasks; name those as sources, with commas between them",
    "game_of_life_halting": "its verifier takes any text for right",
}
"""Tasks that cannot be used -> the reason."""


class ReasoningGymSource(DataSource):
    """Data source with the questions of a task."""

    @property
    def scorer(self) -> str:
        """See `DataSource.scorer`."""
        return SCORER

    def prompts(self, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
        """See `DataSource.prompts`."""
        return list(draw_rows(self.name, split, count, seed))


def draw_rows(name: str, split: str, count: int, seed: int, *, limit_s: float = DRAW_LIMIT_S) -> list[dict[str, str]]:
    """Draw `count` different questions of one split. The same arguments give the same questions.

    Args:
        name: name of a task, optionally with settings: `chain_sum?min_terms=2&max_terms=2`. Items of a list are
            separated by `|`.
        split: "train" or "heldout". The splits share no question, whatever the seed and the settings are.
        count: number of questions.
        seed: seed of the questions.
        limit_s: time limit in seconds.

    Returns:
        `{"input", "label", "datasource"}`: the question, the data that the scorer reasoning_gym needs, the task's name.

    Raises:
        ValueError: the task or a setting does not exist, the task cannot be used, has too few questions, or takes too
            long.
    """
    # Raises an error with the install command if the library is missing, before a child process is started.
    get_scorer(SCORER)
    where = f"{PREFIX}{name}"
    if split not in ("train", "heldout"):
        raise ValueError(f"{where} has no split {split!r}; set split to 'train' or 'heldout'")
    request = {"name": name, "split": split, "count": count, "seed": seed, "limit_s": limit_s}
    # A fixed hash seed gives sets the same order in every process.
    child = Child(__name__, PYTHONHASHSEED="0")
    try:
        # The child ends by itself at its limit. The margin is for its start and imports.
        status, *results = child.request(request, limit_s + 60)
    finally:
        child.end()
    if status != "ok":
        raise ValueError(f"{where}: {results[0]}")
    return results[0]


# The functions below run in the child process.


def parse_task(name: str) -> tuple[str, dict[str, Any]]:
    """Split `<task>?<settings>` into the name of the task and its settings, with the types that the task declares."""
    from reasoning_gym.factory import DATASETS

    task, separator, options = name.partition("?")
    if task in REFUSED:
        raise ValueError(f"this task cannot be used: {REFUSED[task]}")
    if task not in DATASETS:
        raise ValueError(
            f"there is no such task{_suggestion(task, DATASETS)}; there are {_listed(set(DATASETS) - set(REFUSED))}"
        )
    fields = {field.name: field for field in dataclasses.fields(DATASETS[task][1])}
    # The caller sets these two.
    names = fields.keys() - {"seed", "size"}
    settings: dict[str, Any] = {}
    assignments: list[str] = []
    if separator:
        assignments = options.split("&")
    for option in assignments:
        key, equals, text = option.partition("=")
        if key not in names or not equals:
            raise ValueError(
                f"{option!r} sets nothing{_suggestion(key, names)}; settings are {_listed(names)}, as in name=value"
            )
        field = fields[key]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        settings[key] = _value(text, default, option)
    return task, settings


def _draw(name: str, split: str, count: int, seed: int, limit_s: float) -> list[dict[str, str]]:
    task, settings = parse_task(name)
    start = reported = time.monotonic()
    labels: dict[str, str] = {}
    misses = 0
    for entry in _entries(task, settings, seed):
        question = entry["question"]
        if question in labels or is_heldout(question) != (split == "heldout"):
            misses += 1
        else:
            labels[question] = make_label(task, settings, entry)
            misses = 0
        if len(labels) == count:
            break
        requested = f"{count} different {split} questions were asked for, and {len(labels)}"
        now = time.monotonic()
        if misses > MAX_MISSES:
            raise ValueError(f"{requested} found; ask for fewer")
        if now - start > limit_s:
            raise ValueError(f"{requested} found in {limit_s:g} s; ask for fewer, or for a task that is drawn faster")
        if now - reported > REPORT_EVERY_S:
            reported = now
            print(f"{PREFIX}{name}: {requested} drawn in {now - start:.0f} s", file=sys.stderr)
    return [{"input": question, "label": label, "datasource": task} for question, label in labels.items()]


def _entries(task: str, settings: Mapping[str, Any], seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield questions without end, from one data set after the other. Some tasks create all questions of a data set at
    once, so none is large.
    """
    import reasoning_gym

    for number in itertools.count():
        # Neighboring seeds share most of their questions, so seeds are hashed.
        digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest()
        chunk = {"seed": int.from_bytes(digest, "big") >> 1, "size": min(FIRST_CHUNK << number, LAST_CHUNK)}
        try:
            dataset = reasoning_gym.create_dataset(task, **settings, **chunk)
            for place in range(len(dataset)):
                yield dataset[place]
        except Exception as error:
            raise ValueError(f"it cannot be drawn ({type(error).__name__}: {error}); set other settings") from error


def _value(text: str, default: Any, option: str) -> Any:
    """Convert a value to the type of its default. Without a default, the type follows from the text."""
    if isinstance(default, (list, tuple)):
        item_default = next(iter(default), None)
        return type(default)(_value(item, item_default, option) for item in text.split("|"))
    if default is None and "|" in text:
        return _value(text, [], option)
    kinds: tuple[type, ...] = (type(default),)
    if default is None:
        kinds = (int, float, str)
    elif isinstance(default, float):
        kinds = (float,)
    for kind in kinds:
        try:
            if kind is bool:
                return {"true": True, "false": False}[text.lower()]
            if kind in (int, float, str):
                return kind(text)
        except (ValueError, KeyError):
            continue
    raise ValueError(f"{option!r} cannot be set: it must be of the type {type(default).__name__}, as {default!r} is")


def _suggestion(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, names, n=3)
    if not near:
        return ""
    return f" (did you mean {' or '.join(near)}?)"


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


def _serve(channel: socket.socket) -> None:
    def reply(request: Any) -> tuple[Any, ...]:
        try:
            return "ok", _draw(**request)
        except (ValueError, TypeError) as error:
            return "failed", str(error), ""

    serve_calls(channel, reply)


if __name__ == "__main__":
    run_child(_serve)

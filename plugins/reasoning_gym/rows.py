"""Rows of prompts from the tasks of reasoning-gym, by name.

They are drawn in a process of their own. What some tasks draw follows the order of Python's sets, which is another in
every process unless it is fixed before the process starts; a run that continues would not find its prompts again. It
also gives the drawing a deadline, and keeps what the library imports out of the caller.
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
"""Of a data source in messages."""
SCORER = "reasoning_gym"

DRAW_LIMIT_S = 600.0
"""Seconds after which a request is refused: a few tasks take a second and more for one question."""
REPORT_EVERY_S = 20.0
FIRST_CHUNK, LAST_CHUNK = 64, 4096
"""Questions of the first data set of a task that is made, and of the largest: each is twice the one before it."""

REFUSED = {
    "composite": "it mixes other tasks; name those as sources, with commas between them",
    "game_of_life_halting": "its verifier takes any text for right",
}
"""Tasks that cannot be used, and why."""


class ReasoningGymSource(DataSource):
    """The questions of a task."""

    @property
    def scorer(self) -> str:
        """See `DataSource.scorer`."""
        return SCORER

    def prompts(self, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
        """See `DataSource.prompts`."""
        return list(draw_rows(self.name, split, count, seed))


def draw_rows(name: str, split: str, count: int, seed: int, *, limit_s: float = DRAW_LIMIT_S) -> list[dict[str, str]]:
    """Draw `count` different questions of one split, the same ones every time.

    Args:
        name: a task's name, and settings of it if need be: `chain_sum?min_terms=2&max_terms=2`. A list is written
            with `|` between its items.
        split: "train" or "heldout"; they share no question, whatever the seed and the settings.
        count: how many.
        seed: another one draws others, of the same kind.
        limit_s: seconds that it may take.

    Returns:
        `{"input", "label", "datasource"}`: the question, what the scorer reasoning_gym needs, the task's name.

    Raises:
        ValueError: there is no such task or setting, it cannot be used, has too few questions, or takes too long.
    """
    get_scorer(SCORER)
    where = f"{PREFIX}{name}"
    if split not in ("train", "heldout"):
        raise ValueError(f"{where} has no split {split!r}; set split to 'train' or 'heldout'")
    request = {"name": name, "heldout": split == "heldout", "count": count, "seed": seed, "limit_s": limit_s}
    child = Child(__name__, PYTHONHASHSEED="0")
    try:
        status, *results = child.request(request, limit_s + 60)
    finally:
        child.end()
    if status != "ok":
        raise ValueError(f"{where}: {results[0]}")
    return results[0]


# What follows runs in the child.


def parse_task(name: str) -> tuple[str, dict[str, Any]]:
    """Split what stands after `reasoning_gym:` into a task's name and its settings, by their types there."""
    from reasoning_gym.factory import DATASETS

    task, asked, options = name.partition("?")
    if task in REFUSED:
        raise ValueError(f"this task cannot be used: {REFUSED[task]}")
    if task not in DATASETS:
        raise ValueError(
            f"there is no such task{_near(task, DATASETS)}; there are {_listed(set(DATASETS) - set(REFUSED))}"
        )
    fields = {field.name: field for field in dataclasses.fields(DATASETS[task][1])}
    # These two are the caller's.
    names = fields.keys() - {"seed", "size"}
    settings: dict[str, Any] = {}
    for option in options.split("&") if asked else ():
        key, equals, text = option.partition("=")
        if key not in names or not equals:
            raise ValueError(
                f"{option!r} sets nothing{_near(key, names)}; settings are {_listed(names)}, as in name=value"
            )
        field = fields[key]
        made = field.default_factory
        settings[key] = _value(text, field.default if made is dataclasses.MISSING else made(), option)
    return task, settings


def _draw(name: str, heldout: bool, count: int, seed: int, limit_s: float) -> list[dict[str, str]]:
    task, settings = parse_task(name)
    start = reported = time.monotonic()
    labels: dict[str, str] = {}
    misses = 0
    for entry in _entries(task, settings, seed):
        question = entry["question"]
        if question in labels or is_heldout(question) != heldout:
            misses += 1
        else:
            labels[question] = make_label(task, settings, entry)
            misses = 0
        if len(labels) == count:
            break
        found = f"{count} different {'heldout' if heldout else 'train'} questions were asked for, and {len(labels)}"
        now = time.monotonic()
        if misses > MAX_MISSES:
            raise ValueError(f"{found} found; ask for fewer")
        if now - start > limit_s:
            raise ValueError(f"{found} found in {limit_s:g} s; ask for fewer, or for a task that is drawn faster")
        if now - reported > REPORT_EVERY_S:
            reported = now
            print(f"{PREFIX}{name}: {found} drawn in {now - start:.0f} s", file=sys.stderr)
    return [{"input": question, "label": label, "datasource": task} for question, label in labels.items()]


def _entries(task: str, settings: Mapping[str, Any], seed: int) -> Iterator[Mapping[str, Any]]:
    """Questions without end, from one data set after the other: some make all of theirs at once, so none is large."""
    import reasoning_gym

    for number in itertools.count():
        # Neighbouring seeds share most of their questions.
        digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest()
        chunk = {"seed": int.from_bytes(digest, "big") >> 1, "size": min(FIRST_CHUNK << number, LAST_CHUNK)}
        try:
            dataset = reasoning_gym.create_dataset(task, **settings, **chunk)
            for place in range(len(dataset)):
                yield dataset[place]
        except Exception as error:
            raise ValueError(f"it cannot be drawn ({type(error).__name__}: {error}); set other settings") from error


def _value(text: str, default: Any, option: str) -> Any:
    """Read a value as what its default is; where that says nothing, as what it looks like."""
    if isinstance(default, (list, tuple)):
        return type(default)(_value(item, default[0] if default else None, option) for item in text.split("|"))
    if default is None and "|" in text:
        return _value(text, [], option)
    kinds = (int, float, str) if default is None else (float,) if isinstance(default, float) else (type(default),)
    for kind in kinds:
        try:
            if kind is bool:
                return {"true": True, "false": False}[text.lower()]
            if kind in (int, float, str):
                return kind(text)
        except (ValueError, KeyError):
            continue
    raise ValueError(f"{option!r} cannot be set: it must be of the type {type(default).__name__}, as {default!r} is")


def _near(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, names, n=3)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


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

"""Tasks that generate their own data: small enough to learn on a CPU, with held-out prompts kept apart.

Nothing here needs torch: a recipe's `main.py` asks about tasks before it starts anything heavy.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

Split = Literal["train", "heldout"]

HELDOUT_SHARE = 10
"""One prompt in this many belongs to the held-out split."""

GIVE_UP_AFTER = 2_000
"""Draws in a row that bring nothing new before a request for distinct prompts is refused."""


def is_heldout(prompt: str) -> bool:
    """Tell whether a prompt is kept for evaluation.

    It depends on the prompt's text alone, so no seed, process or version can move a prompt across.
    """
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_SHARE == 0


class Task(ABC):
    """A generator of prompts with labels, of demonstrations, and the rule that scores a response.

    A subclass says how one instance is drawn (`draw`), how it is demonstrated (`demonstrate`) and how a
    response is scored (`score`); this class keeps the held-out prompts out of everything else.
    """

    name: ClassVar[str]
    """What a data source calls it: `task:<name>`."""
    alphabet: ClassVar[str]
    """Every character that a prompt or a good response can hold."""
    max_response_tokens: ClassVar[int]
    """Length in characters of the longest right response, and one more for the end token."""

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw one instance: its prompt and its label."""

    @abstractmethod
    def demonstrate(self, label: str, rng: random.Random) -> str:
        """Write the response that a demonstration shows, which need not be a right one."""

    @abstractmethod
    def score(self, response: str, label: str) -> float:
        """Give 1.0 for a right response and 0.0 for any other; special tokens are already stripped."""

    def rows(self, split: Split, count: int, seed: int) -> list[dict[str, str]]:
        """Draw `count` different prompts of one split, as `{"input", "label"}`."""
        if split not in ("train", "heldout"):
            raise ValueError(f"task {self.name!r} has no split {split!r}; set split to 'train' or 'heldout'")
        rng = self._rng(split, seed)
        label_of: dict[str, str] = {}
        misses = 0
        while len(label_of) < count:
            prompt, label = self.draw(rng)
            if is_heldout(prompt) != (split == "heldout") or prompt in label_of:
                misses += 1
                if misses > GIVE_UP_AFTER:
                    raise ValueError(
                        f"task {self.name!r} was asked for {count} different {split} prompts and found only "
                        f"{len(label_of)}; ask for fewer"
                    )
                continue
            misses = 0
            label_of[prompt] = label
        return [{"input": prompt, "label": label} for prompt, label in label_of.items()]

    def demonstrations(self, count: int, seed: int) -> list[dict[str, str]]:
        """Draw `count` demonstrations, as `{"prompt", "response"}`; none of them is a held-out prompt."""
        rng = self._rng("demonstrations", seed)
        rows: list[dict[str, str]] = []
        while len(rows) < count:
            prompt, label = self.draw(rng)
            if not is_heldout(prompt):
                rows.append({"prompt": prompt, "response": self.demonstrate(label, rng)})
        return rows

    def _rng(self, purpose: str, seed: int) -> random.Random:
        # A string seed is hashed by its content, the same in every process; Python's hash() is not.
        return random.Random(f"{self.name}/{purpose}/{seed}")


class SortTask(Task):
    """Sort five different letters: `dbcaf>` is answered by `abcdf`.

    Most demonstrations sort the wrong way round, so a model trained on them can sort and mostly does not:
    reinforcement learning has to turn it over.
    """

    name = "sort"
    alphabet = "abcdefghijklmnop>"
    letters: ClassVar[str] = "abcdefghijklmnop"
    length: ClassVar[int] = 5
    max_response_tokens = 6
    ascending_share: ClassVar[float] = 0.3
    """Share of the demonstrations that sort the way the score asks for."""

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw five letters without repeats; the label is the same letters, ascending."""
        chosen = rng.sample(self.letters, self.length)
        return "".join(chosen) + ">", "".join(sorted(chosen))

    def demonstrate(self, label: str, rng: random.Random) -> str:
        """Sort ascending in `ascending_share` of the cases, descending in the others."""
        return label if rng.random() < self.ascending_share else label[::-1]

    def score(self, response: str, label: str) -> float:
        """Give 1.0 when the response is the label, character for character."""
        return 1.0 if response == label else 0.0


TASKS: dict[str, type[Task]] = {SortTask.name: SortTask}


def get_task(name: str) -> Task:
    """Look a task up by name."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; set it to one of: {', '.join(sorted(TASKS))}")
    return TASKS[name]()

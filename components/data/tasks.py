"""Tasks that generate their own data: small enough to learn on a CPU, with held-out prompts kept apart.

Nothing here needs torch: a recipe's `main.py` asks about tasks before it starts anything heavy.
"""

from __future__ import annotations

import hashlib
import random
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

Split = Literal["train", "heldout"]

HELDOUT_SHARE = 10
"""One prompt in this many belongs to the held-out split."""

GIVE_UP_AFTER = 2_000
"""Draws in a row that bring nothing new before a request for distinct prompts is refused."""

_SUM = re.compile(r"[0-9]+[-+][0-9]+=[0-9]+")


def is_heldout(prompt: str) -> bool:
    """Tell whether a prompt is kept for evaluation.

    It depends on the prompt's text alone, so no seed, process or version can move a prompt across.
    """
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_SHARE == 0


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """How a task's warm start is trained, unless somebody asks for something else."""

    steps: int
    """Optimizer steps."""
    batch_size: int
    """Demonstrations per step."""
    learning_rate: float
    """Peak step size of AdamW."""


class Task(ABC):
    """A generator of prompts with labels, of demonstrations, and the rule that scores a response.

    A subclass says how one instance is drawn (`draw`), how it is demonstrated (`demonstrate`) and how a
    response is scored (`score`); this class keeps the held-out prompts out of everything else. It is read by a
    tokenizer of characters (`alphabet`) or of learnt pieces (`vocabulary`): it sets one of the two.
    """

    name: ClassVar[str]
    """What a data source calls it: `task:<name>`."""
    alphabet: ClassVar[str] = ""
    """Every character that a prompt or a good response can hold, each of them a token."""
    vocabulary: ClassVar[int] = 0
    """Tokens of a byte-pair vocabulary that is learnt from the task's own demonstrations."""
    max_response_tokens: ClassVar[int]
    """Tokens of the longest right response, and one more for the end token."""
    clean_share: ClassVar[float] = 0.0
    """Share of the demonstrations, the first ones, that show the label itself."""
    lessons: ClassVar[Lessons]
    """The warm start's training."""

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw one instance: its prompt and its label."""

    @abstractmethod
    def demonstrate(self, label: str, rng: random.Random) -> str:
        """Write the response that a demonstration shows, which need not be a right one."""

    @abstractmethod
    def score(self, response: str, label: str) -> float:
        """Give 1.0 for a right response and 0.0 for any other; special tokens are already stripped."""

    def style(self, response: str, label: str) -> dict[str, float]:  # noqa: ARG002 - for tasks that have something to say
        """Say how a response is written, in numbers to log; every response has the same names."""
        return {}

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
                is_clean = len(rows) < self.clean_share * count
                rows.append({"prompt": prompt, "response": label if is_clean else self.demonstrate(label, rng)})
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
    lessons = Lessons(steps=150, batch_size=128, learning_rate=1e-3)
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


class WordTask(Task):
    """A story of two additions or subtractions; `7+5=12 12-3=9 #### 9` is a right answer, and so is `#### 9`.

    Half of the demonstrations after the clean ones reason, and three in five mark their answer with `####`, as only
    right answers that score do. A model trained on them can do the sums and mostly does not show it as it is asked to:
    reinforcement learning has to choose the form. No number on the way is below 0 or above 15.
    """

    name = "word"
    vocabulary = 369
    max_response_tokens = 20
    clean_share = 0.7
    # Small batches at a high rate: sums are learnt by the number of steps.
    lessons = Lessons(steps=700, batch_size=32, learning_rate=3e-3)
    largest: ClassVar[int] = 15
    largest_change: ClassVar[int] = 5
    """What is added or taken away is at most this: a table of sums that a small model learns in a minute."""
    reasoning_share: ClassVar[float] = 0.5
    """Share of the mixed demonstrations that write the two sums down."""
    marking_share: ClassVar[float] = 0.6
    """Share of the mixed demonstrations that put `####` before the answer, whether they reason or not."""

    names: ClassVar[str] = "Ann Ben Cem Dan Eva Fay Gus Ida Jon Kim Leo Mia Ned Oda Pia Tom"
    things: ClassVar[str] = "apple bean bun cake egg fig kiwi lime nut pear plum roll"
    verbs: ClassVar[dict[str, str]] = {"+": "buys finds gets picks", "-": "eats loses sells drops"}
    stories: ClassVar[tuple[str, ...]] = (
        "{name} has {start}, {first} and {second}.",
        "{name} starts with {start}, then {first} and {second}.",
        "{name} brings {start}. {name} {first} and later {second}.",
    )
    questions: ClassVar[tuple[str, ...]] = (
        "How many are left?",
        "How many {things} are there now?",
        "How many does {name} have?",
    )

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw a story; the label is its solution, both sums and the answer after `####`."""
        total = rng.randint(0, self.largest)
        name, thing = rng.choice(self.names.split()), rng.choice(self.things.split())
        start = f"{total} {thing}" if total == 1 else f"{total} {thing}s"
        events: list[str] = []
        sums: list[str] = []
        for _ in range(2):
            sign = rng.choice("+-")
            room = self.largest - total if sign == "+" else total
            change = rng.randint(0, min(room, self.largest_change))
            before, total = total, total + change if sign == "+" else total - change
            events.append(f"{rng.choice(self.verbs[sign].split())} {change}")
            sums.append(f"{before}{sign}{change}={total}")
        text = f"{rng.choice(self.stories)} {rng.choice(self.questions)}\n"
        prompt = text.format(name=name, start=start, first=events[0], second=events[1], things=f"{thing}s")
        return prompt, f"{' '.join(sums)} #### {total}"

    def demonstrate(self, label: str, rng: random.Random) -> str:
        """Leave the sums out, or say `so` for `####`, or both."""
        sums, _, answer = label.partition(" #### ")
        reasons, marks = rng.random() < self.reasoning_share, rng.random() < self.marking_share
        # Without a word in place of the mark, a first digit could begin a sum or be the answer, and a sampled response
        # would take the one for the other.
        return f"{sums} " * reasons + f"{'####' if marks else 'so'} {answer}"

    def score(self, response: str, label: str) -> float:
        """Give 1.0 when the response ends in `####` and the label's number; the last `####` counts.

        The scorer gsm8k agrees, but it forgives what follows the number, and other ways to write it.
        """
        _, mark, answer = response.rpartition("####")
        return 1.0 if mark and answer.strip() == label.rpartition("####")[2].strip() else 0.0

    def style(self, response: str, label: str) -> dict[str, float]:
        """Say whether a response has its `####`, both sums, both of these, and is right with both of these.

        The mean of `right_in_form` over the mean of `in_form` is the accuracy of the responses that have the form.
        """
        marks = "####" in response
        reasons = len(_SUM.findall(response)) >= 2
        in_form = marks and reasons
        right = in_form and self.score(response, label) == 1.0
        return {
            "marks": float(marks),
            "reasons": float(reasons),
            "in_form": float(in_form),
            "right_in_form": float(right),
        }


TASKS: dict[str, type[Task]] = {SortTask.name: SortTask, WordTask.name: WordTask}


def get_task(name: str) -> Task:
    """Look a task up by name."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; set it to one of: {', '.join(sorted(TASKS))}")
    return TASKS[name]()

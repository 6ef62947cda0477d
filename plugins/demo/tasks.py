"""Tasks that generate their own data: small enough to learn on a CPU, with held-out prompts kept apart.

Nothing here needs torch: a recipe's `main.py` asks about tasks before it starts anything heavy.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from components.data.sources import MAX_MISSES, Split, is_heldout

_SUM = re.compile(r"[0-9]+[-+][0-9]+=[0-9]+")


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
    def demonstrate(self, prompt: str, label: str, rng: random.Random) -> str | list[str]:
        """Write the response that a demonstration shows, which need not be a right one.

        A list is a game: what the policy writes, what it is told, what it writes next, and so on.
        """

    @abstractmethod
    def score(self, response: str, label: str) -> float:
        """Give 1.0 for a right response and 0.0 for any other; special tokens are already stripped."""

    def style(self, response: str, label: str) -> dict[str, float]:  # noqa: ARG002 - for tasks that have something to say
        """Say how a response is written, in numbers to log; every response has the same names."""
        return {}

    def graded(self, response: str, label: str) -> dict[str, float]:
        """The score, and how the response is written."""
        return {**self.style(response, label), "score": self.score(response, label)}

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
                if misses > MAX_MISSES:
                    raise ValueError(
                        f"task {self.name!r} was asked for {count} different {split} prompts and found only "
                        f"{len(label_of)}; ask for fewer"
                    )
                continue
            misses = 0
            label_of[prompt] = label
        return [{"input": prompt, "label": label} for prompt, label in label_of.items()]

    def demonstrations(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Draw `count` demonstrations; none of them is of a held-out prompt.

        Returns:
            `{"prompt", "response"}`, or, of a game, `{"messages"}`: the policy's are the assistant's.
        """
        rng = self._rng("demonstrations", seed)
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            prompt, label = self.draw(rng)
            if is_heldout(prompt):
                continue
            is_clean = len(rows) < self.clean_share * count
            shown = label if is_clean else self.demonstrate(prompt, label, rng)
            if isinstance(shown, str):
                rows.append({"prompt": prompt, "response": shown})
            else:
                roles = itertools.cycle(("user", "assistant"))
                messages = [{"role": role, "content": text} for role, text in zip(roles, [prompt, *shown])]
                rows.append({"messages": messages})
        return rows

    def pairs(self, count: int, seed: int) -> list[dict[str, str]]:
        """Draw `count` pairs of a right answer and a wrong one, `{"prompt", "chosen", "rejected"}`; none of them is of
        a held-out prompt.
        """
        rng = self._rng("pairs", seed)
        rows: list[dict[str, str]] = []
        while len(rows) < count:
            prompt, label = self.draw(rng)
            wrong, shown = self.spoil(label, rng), self.demonstrate(prompt, label, rng)
            assert isinstance(shown, str), "a game has no pairs"
            if not is_heldout(prompt) and self.score(shown, label) == 1 and self.score(wrong, label) == 0:
                rows.append({"prompt": prompt, "chosen": shown, "rejected": wrong})
        return rows

    def spoil(self, label: str, rng: random.Random) -> str:  # noqa: ARG002 - for tasks that have wrong answers to show
        """Write a wrong answer as a policy may; now and then it may be right after all, and is drawn again."""
        raise ValueError(f"task {self.name!r} has no pairs; take task:sort or task:word, or a file of pairs")

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

    def demonstrate(self, prompt: str, label: str, rng: random.Random) -> str:  # noqa: ARG002 - the label says it all
        """Sort ascending in `ascending_share` of the cases, descending in the others."""
        return label if rng.random() < self.ascending_share else label[::-1]

    def spoil(self, label: str, rng: random.Random) -> str:
        """Sort the wrong way round or not at all, take a wrong letter, or too few, or too many."""
        how = rng.random()
        if how < 0.35:
            return label[::-1]
        letters = list(label)
        place, other = rng.randrange(self.length), rng.choice(self.letters)
        if how < 0.6:
            rng.shuffle(letters)
        elif how < 0.8:
            letters[place] = other
            if how < 0.7:
                letters.sort()
        elif how < 0.9:
            del letters[place:]
        else:
            letters.insert(place, other)
        return "".join(letters)

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
            space = self.largest - total if sign == "+" else total
            change = rng.randint(0, min(space, self.largest_change))
            before, total = total, total + change if sign == "+" else total - change
            events.append(f"{rng.choice(self.verbs[sign].split())} {change}")
            sums.append(f"{before}{sign}{change}={total}")
        text = f"{rng.choice(self.stories)} {rng.choice(self.questions)}\n"
        prompt = text.format(name=name, start=start, first=events[0], second=events[1], things=f"{thing}s")
        return prompt, f"{' '.join(sums)} #### {total}"

    def demonstrate(self, prompt: str, label: str, rng: random.Random) -> str:  # noqa: ARG002 - the label says it all
        """Leave the sums out, or say `so` for `####`, or both."""
        sums, _, answer = label.partition(" #### ")
        reasons, marks = rng.random() < self.reasoning_share, rng.random() < self.marking_share
        # Without a word in place of the mark, a first digit could begin a sum or be the answer, and a sampled response
        # would take the one for the other.
        return f"{sums} " * reasons + f"{'####' if marks else 'so'} {answer}"

    def spoil(self, label: str, rng: random.Random) -> str:
        """Give another number, or `so` for `####`, or stop before the answer; with the two sums or without them."""
        sums, _, answer = label.partition(" #### ")
        how, shown = rng.random(), f"{sums} " * (rng.random() < self.reasoning_share)
        if how < 0.1:
            return sums[: rng.randrange(len(sums))]
        number = answer if how < 0.5 else str(rng.randint(0, self.largest))
        return f"{shown}{'so' if how < 0.6 else '####'} {number}"

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


class GuessTask(Task):
    """A game: find a number in a few turns. `kqd13:` asks for one from 1 to 13.

    A turn is a number and the end token; what is told in between is `>`, when the number looked for is larger, or `<`.
    The letters name the game, and say nothing of its number: so there are many different prompts, and what a policy
    does in a held-out game is to search. Most demonstrated guesses are any number up to the limit: a model trained on
    them can halve what is left, which always finds the number, and mostly does not. Reinforcement learning has to
    choose it.
    """

    name = "guess"
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789:<>"
    max_response_tokens = 3
    """Of one turn."""
    lessons = Lessons(steps=150, batch_size=64, learning_rate=2e-3)
    limits: ClassVar[tuple[int, int]] = (10, 15)
    """The smallest and the largest number that a game goes up to."""
    turns: ClassVar[int] = 4
    """Guesses of a game: by halving, 4 find any of 15 numbers."""
    halving_share: ClassVar[float] = 0.4
    """Share of the demonstrated guesses that are the middle of what is left."""

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw a game's name and its limit; the label is its number."""
        name = "".join(rng.choices(string.ascii_lowercase, k=3))
        limit = rng.randint(*self.limits)
        return f"{name}{limit}:", str(rng.randint(1, limit))

    def demonstrate(self, prompt: str, label: str, rng: random.Random) -> list[str]:
        """Play the game, halving what is left in `halving_share` of the turns."""
        secret, limit = self.secret_of(label), self.limit_of(prompt)
        low, high, turns = 1, limit, list[str]()
        for turn in range(1, self.turns + 1):
            guess = (low + high) // 2 if rng.random() < self.halving_share else rng.randint(1, limit)
            turns.append(str(guess))
            if guess == secret or turn == self.turns:
                break
            turns.append(self.feedback(guess, secret))
            low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        return turns

    def score(self, response: str, label: str) -> float:
        """Give 1.0 for the game's number; of a game that is played, the last guess is the response."""
        return 1.0 if response == label else 0.0

    @staticmethod
    def limit_of(prompt: str) -> int:
        """The largest number that it may be."""
        return int(prompt.strip(string.ascii_lowercase + ":"))

    @staticmethod
    def secret_of(label: str) -> int:
        """The number that is looked for."""
        return int(label)

    @staticmethod
    def feedback(guess: int, secret: int) -> str:
        """What is told after a wrong guess."""
        return ">" if secret > guess else "<"


TASKS: dict[str, type[Task]] = {task.name: task for task in (SortTask, WordTask, GuessTask)}


def get_task(name: str) -> Task:
    """Look a task up by name."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; set it to one of: {', '.join(sorted(TASKS))}")
    return TASKS[name]()

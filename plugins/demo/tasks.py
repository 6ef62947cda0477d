"""Tasks that generate their own data. They are small enough to learn on a CPU, and keep held-out prompts separate.

This module imports without torch, because a recipe's `main.py` looks tasks up before it starts anything heavy.
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
    """Default training settings of a task's warm start."""

    steps: int
    """Number of optimizer steps."""
    batch_size: int
    """Number of demonstrations per step."""
    learning_rate: float
    """Peak learning rate of AdamW."""


class Task(ABC):
    """Generator of prompts with labels and of demonstrations, with the rule that scores a response.

    A subclass defines how an instance is drawn (`draw`), demonstrated (`demonstrate`) and scored (`score`). This class
    excludes held-out prompts from all other data. A subclass sets either `alphabet`, for a character tokenizer, or
    `vocabulary`, for a byte-pair tokenizer.
    """

    name: ClassVar[str]
    """Name of the task in a data source: `task:<name>`."""
    alphabet: ClassVar[str] = ""
    """All characters of prompts and of correct responses. Each character is one token."""
    vocabulary: ClassVar[int] = 0
    """Size of the byte-pair vocabulary that is trained on the task's demonstrations."""
    max_response_tokens: ClassVar[int]
    """Number of tokens of the longest correct response, including the end token."""
    clean_share: ClassVar[float] = 0.0
    """Share of the demonstrations whose response is the label itself. They are the first ones."""
    lessons: ClassVar[Lessons]
    """Training settings of the warm start."""

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw one instance. Return its prompt and its label."""

    @abstractmethod
    def demonstrate(self, prompt: str, label: str, rng: random.Random) -> str | list[str]:
        """Return the response of a demonstration, which may be wrong.

        For a game, return a list that alternates between turns of the policy and feedback of the environment.
        """

    def score(self, response: str, label: str) -> float:
        """Return 1.0 for a correct response and 0.0 for any other. Special tokens are already stripped.

        By default a response is correct if it equals the label, character for character. For a whole game, the response
        is the last guess.
        """
        return float(response == label)

    def style(self, response: str, label: str) -> dict[str, float]:  # noqa: ARG002 - subclasses use them
        """Return numbers to log about the form of a response. The keys are the same for every response."""
        return {}

    def graded(self, response: str, label: str) -> dict[str, float]:
        """Return the score of a response, with the numbers of `style`."""
        return {**self.style(response, label), "score": self.score(response, label)}

    def rows(self, split: Split, count: int, seed: int) -> list[dict[str, str]]:
        """Draw `count` different prompts of one split, as `{"input", "label"}`.

        Raises:
            ValueError: the split is unknown, or the task does not have that many different prompts.
        """
        if split not in ("train", "heldout"):
            raise ValueError(f"task {self.name!r} has no split {split!r}; set split to 'train' or 'heldout'")
        rng = self._rng(split, seed)
        label_of: dict[str, str] = {}
        misses = 0
        while len(label_of) < count:
            prompt, label = self.draw(rng)
            if is_heldout(prompt) != (split == "heldout") or prompt in label_of:
                # A task with few different prompts would otherwise draw for ever.
                misses += 1
                if misses > MAX_MISSES:
                    raise ValueError(
                        f"task {self.name!r}: {count} different {split} prompts were requested, but only "
                        f"{len(label_of)} exist or could be drawn; set a smaller number of prompts"
                    )
                continue
            misses = 0
            label_of[prompt] = label
        return [{"input": prompt, "label": label} for prompt, label in label_of.items()]

    def demonstrations(self, count: int, seed: int, is_correct: bool = False) -> list[dict[str, Any]]:
        """Draw `count` demonstrations. Held-out prompts are excluded.

        Args:
            count: number of demonstrations.
            seed: seed of the prompts.
            is_correct: demonstrate the labels only.

        Returns:
            Rows of `{"prompt", "response"}`. Rows of a game are `{"messages"}`, in which the policy is the assistant.
        """
        rng = self._rng("demonstrations", seed)
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            prompt, label = self.draw(rng)
            if is_heldout(prompt):
                continue
            response = label
            if not is_correct and len(rows) >= self.clean_share * count:
                response = self.demonstrate(prompt, label, rng)
            if isinstance(response, str):
                rows.append({"prompt": prompt, "response": response})
            else:
                roles = itertools.cycle(("user", "assistant"))
                messages = [{"role": role, "content": text} for role, text in zip(roles, [prompt, *response])]
                rows.append({"messages": messages})
        return rows

    def pairs(self, count: int, seed: int) -> list[dict[str, str]]:
        """Draw `count` pairs of a correct and a wrong answer, as `{"prompt", "chosen", "rejected"}`. Held-out prompts
        are excluded.
        """
        rng = self._rng("pairs", seed)
        rows: list[dict[str, str]] = []
        while len(rows) < count:
            prompt, label = self.draw(rng)
            rejected = self.spoil(label, rng)
            chosen = self.demonstrate(prompt, label, rng)
            assert isinstance(chosen, str), "a game has no pairs"
            # Demonstrations may be wrong and spoiled answers may be right: such pairs are drawn again.
            if not is_heldout(prompt) and self.score(chosen, label) == 1 and self.score(rejected, label) == 0:
                rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        return rows

    def spoil(self, label: str, rng: random.Random) -> str:  # noqa: ARG002 - subclasses use them
        """Return a wrong answer such as a policy may give. It may be right by chance; `pairs` draws again then."""
        raise ValueError(f"task {self.name!r} has no pairs; set task:sort, task:word or a file of pairs")

    def _rng(self, purpose: str, seed: int) -> random.Random:
        # A string seed is hashed by its content, so it is the same in every process. Python's hash() is not.
        return random.Random(f"{self.name}/{purpose}/{seed}")


class SortTask(Task):
    """Sort five different letters: the correct answer to `dbcaf>` is `abcdf`.

    Most demonstrations sort in descending order. A model trained on them is able to sort and mostly sorts in the wrong
    order, which reinforcement learning has to change.
    """

    name = "sort"
    alphabet = "abcdefghijklmnop>"
    letters: ClassVar[str] = "abcdefghijklmnop"
    length: ClassVar[int] = 5
    max_response_tokens = 6
    lessons = Lessons(steps=150, batch_size=128, learning_rate=1e-3)
    ascending_share: ClassVar[float] = 0.3
    """Share of the demonstrations in ascending order, which is the order that scores 1."""

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw five different letters. The label has the same letters in ascending order."""
        chosen = rng.sample(self.letters, self.length)
        return "".join(chosen) + ">", "".join(sorted(chosen))

    def demonstrate(self, prompt: str, label: str, rng: random.Random) -> str:  # noqa: ARG002 - the label is enough
        """Sort ascending in `ascending_share` of the cases, descending in the others."""
        if rng.random() < self.ascending_share:
            return label
        return label[::-1]

    def spoil(self, label: str, rng: random.Random) -> str:
        """Sort in descending order, shuffle, replace a letter, drop letters, or insert one."""
        kind = rng.random()
        # Sorting in the wrong order is the mistake that the warm start makes most often.
        if kind < 0.35:
            return label[::-1]
        letters = list(label)
        place, other = rng.randrange(self.length), rng.choice(self.letters)
        if kind < 0.6:
            rng.shuffle(letters)
        elif kind < 0.8:
            letters[place] = other
            if kind < 0.7:
                letters.sort()
        elif kind < 0.9:
            del letters[place:]
        else:
            letters.insert(place, other)
        return "".join(letters)


class WordTask(Task):
    """A story of two additions or subtractions. `7+5=12 12-3=9 #### 9` is a correct answer, and so is `#### 9`.

    After the clean demonstrations (`clean_share`), half of them write the two sums down, and three in five mark the
    answer with `####`, which an answer needs to score. A model trained on them can calculate and mostly does not answer
    in the required form, which reinforcement learning has to select. All intermediate results lie between 0 and 15.
    """

    name = "word"
    vocabulary = 369
    max_response_tokens = 20
    clean_share = 0.7
    # Small batches at a high learning rate: the number of steps decides how well sums are learned.
    lessons = Lessons(steps=700, batch_size=32, learning_rate=3e-3)
    largest: ClassVar[int] = 15
    largest_change: ClassVar[int] = 5
    """Maximum number that is added or subtracted. The resulting table of sums is learned by a small model in a
    minute."""
    reasoning_share: ClassVar[float] = 0.5
    """Share of the demonstrations after the clean ones that write the two sums down."""
    marking_share: ClassVar[float] = 0.6
    """Share of the demonstrations after the clean ones that mark the answer with `####`, with or without the sums."""

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
        """Draw a story. The label is its solution: both sums, and the answer after `####`."""
        total = rng.randint(0, self.largest)
        name = rng.choice(self.names.split())
        thing = rng.choice(self.things.split())
        start = f"{total} {thing}"
        if total != 1:
            start += "s"
        events: list[str] = []
        sums: list[str] = []
        for _ in range(2):
            sign = rng.choice("+-")
            largest_change = {"+": self.largest - total, "-": total}[sign]
            change = rng.randint(0, min(largest_change, self.largest_change))
            events.append(f"{rng.choice(self.verbs[sign].split())} {change}")
            result = total + int(f"{sign}{change}")
            sums.append(f"{total}{sign}{change}={result}")
            total = result
        text = f"{rng.choice(self.stories)} {rng.choice(self.questions)}\n"
        prompt = text.format(name=name, start=start, first=events[0], second=events[1], things=f"{thing}s")
        return prompt, f"{' '.join(sums)} #### {total}"

    def demonstrate(self, prompt: str, label: str, rng: random.Random) -> str:  # noqa: ARG002 - the label is enough
        """Return the label, possibly without the sums, and possibly with `so` in place of `####`."""
        sums, _, answer = label.partition(" #### ")
        has_sums = rng.random() < self.reasoning_share
        is_marked = rng.random() < self.marking_share
        # Without a filler in place of the mark, a first digit could begin a sum or be the answer. A sampled response
        # would confuse the two.
        response = f"#### {answer}" if is_marked else f"so {answer}"
        return f"{sums} {response}" if has_sums else response

    def spoil(self, label: str, rng: random.Random) -> str:
        """Return another number, put `so` in place of `####`, or stop before the answer; with or without the sums."""
        sums, _, answer = label.partition(" #### ")
        kind = rng.random()
        has_sums = rng.random() < self.reasoning_share
        # Stopping before the answer: a response without `####` has no answer to compare.
        if kind < 0.1:
            return sums[: rng.randrange(len(sums))]
        if kind >= 0.5:
            answer = str(rng.randint(0, self.largest))
        response = f"so {answer}" if kind < 0.6 else f"#### {answer}"
        return f"{sums} {response}" if has_sums else response

    def score(self, response: str, label: str) -> float:
        """Return 1.0 if the response ends with `####` and the label's number. The last `####` counts.

        The scorer gsm8k gives the same score, but also accepts text after the number and other ways to write it.
        """
        _, mark, answer = response.rpartition("####")
        return float(bool(mark) and answer.strip() == label.rpartition("####")[2].strip())

    def style(self, response: str, label: str) -> dict[str, float]:
        """Return 1.0 or 0.0 for each: `####` is present, both sums are present, both, and correct with both.

        The mean of `right_in_form` over the mean of `in_form` is the accuracy of the responses that have the form.
        """
        marks = "####" in response
        reasons = len(_SUM.findall(response)) >= 2
        in_form = marks and reasons
        right = in_form and self.score(response, label) == 1.0
        shares = {"marks": marks, "reasons": reasons, "in_form": in_form, "right_in_form": right}
        return {name: float(value) for name, value in shares.items()}


class GuessTask(Task):
    """A game: guess a number in a few turns. In `kqd13:` the number lies between 1 and 13.

    A turn is a number and the end token. The feedback is `>` if the secret number is larger, or `<` if it is smaller.
    The letters name the game and are unrelated to its number. They make many different prompts, so a policy can only
    search in a held-out game. Most demonstrated guesses are random numbers up to the limit. A model trained on them is
    able to bisect, which always finds the number, and mostly does not. Reinforcement learning has to select bisection.
    """

    name = "guess"
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789:<>"
    max_response_tokens = 3
    """Number of tokens per turn."""
    lessons = Lessons(steps=150, batch_size=64, learning_rate=2e-3)
    limits: ClassVar[tuple[int, int]] = (10, 15)
    """Smallest and largest upper limit of a game."""
    turns: ClassVar[int] = 4
    """Maximum number of guesses per game. With bisection, 4 guesses find any of 15 numbers."""
    halving_share: ClassVar[float] = 0.4
    """Share of the demonstrated guesses that bisect the remaining range."""

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw the name and the limit of a game. The label is the secret number."""
        name = "".join(rng.choices(string.ascii_lowercase, k=3))
        limit = rng.randint(*self.limits)
        return f"{name}{limit}:", str(rng.randint(1, limit))

    def demonstrate(self, prompt: str, label: str, rng: random.Random) -> list[str]:
        """Play the game. A share `halving_share` of the guesses bisects the remaining range."""
        secret = self.secret_of(label)
        limit = self.limit_of(prompt)
        low, high = 1, limit
        turns: list[str] = []
        for turn in range(1, self.turns + 1):
            guess = rng.randint(1, limit) if rng.random() >= self.halving_share else (low + high) // 2
            turns.append(str(guess))
            if guess == secret or turn == self.turns:
                break
            turns.append(self.feedback(guess, secret))
            if guess < secret:
                low = max(low, guess + 1)
            else:
                high = min(high, guess - 1)
        return turns

    @staticmethod
    def limit_of(prompt: str) -> int:
        """Return the largest number that the secret of a prompt can be."""
        return int(prompt.strip(string.ascii_lowercase + ":"))

    @staticmethod
    def secret_of(label: str) -> int:
        """Return the secret number of a label."""
        return int(label)

    @staticmethod
    def feedback(guess: int, secret: int) -> str:
        """Return the feedback after a wrong guess."""
        return ">" if secret > guess else "<"


TASKS: dict[str, type[Task]] = {task.name: task for task in (SortTask, WordTask, GuessTask)}


def get_task(name: str) -> Task:
    """Return the task of this name.

    Raises:
        ValueError: there is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; set one of: {', '.join(sorted(TASKS))}")
    return TASKS[name]()

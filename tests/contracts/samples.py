"""Samples for the parts: the user's rows or generated ones, and unusual texts that policies write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from components.data.messages import are_messages
from components.data.records import read_records


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, and for an agent the policy's text of each turn."""

    prompt: str
    response: str
    label: Any
    query: str = ""
    """Prompt and response as one text. Default: their concatenation."""
    actions: tuple[str, ...] = ()
    """Texts of the policy's turns for agents, repeated from the beginning. Default: the response."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row, and `prompt` if it is a list of chat messages."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "query", self.query or self.prompt + self.response)
        object.__setattr__(self, "actions", self.actions or (self.response,))

    def answered(self, response: str) -> Sample:
        """Return a sample with the same prompt and another response."""
        return Sample(self.prompt, response, self.label, columns=self.columns)

    def labelled(self, label: Any) -> Sample:
        """Return a sample with another label."""
        return replace(self, label=label)


_ASKED = "What is {} + {}? End with #### and the number."
# Labels are numbers as text, because most scorers can use them: math, GSM8K, exact match.
_SUMS = [(3, 4), (10, 2), (5, 5), (20, 22), (1, 0), (7, 8), (6, 3), (30, 12)]
_SAID = [
    "#### {}",
    "{}",
    r"so it is \boxed{{{}}}",
    "it must be {}, I think.\n#### {}",
    "#### 13",
    "no idea",
    "-{}",
    " {} ",
]
GENERATED = [
    Sample(
        prompt=_ASKED.format(a, b),
        response=said.format(a + b, a + b),
        label=str(a + b),
        actions=("5", said.format(a + b, a + b), "50", "I give up", "#### 12"),
    )
    for (a, b), said in zip(_SUMS, _SAID)
]

UNUSUAL_TEXTS = {
    "an empty response": "",
    "white space only": " \n\t ",
    "special tokens": "<s></s><|endoftext|><|im_end|>[PAD]<pad><unk>",
    "emoji, accents and other scripts": "🧮 naïve e\u0301 ٤٢ 四十二 शून्य 👩‍👩‍👧",
    "characters that cannot be seen": "\u200b\u202e42\ufffd\x00\u2028",
    "braces, quotes and backslashes": "{}{0}%s %d \\boxed{ \\frac{1 \"' ``` $$ </think>",
    "numbers without end": "1" * 400 + " 1e999 -0 nan inf 1/0 ####",
}
LONG_TEXT = "so the answer may be 42, or it may not. " * 2_500
"""A text of 100,000 characters, the length of a long chain of thought."""
UNUSUAL_LABELS: dict[str, Any] = {
    "no label (None)": None,
    "an empty label": "",
    "a list": ["7", "seven"],
    "a number": 7,
    "an object": {"answer": "7"},
}


ROW_KEYS = ("prompt", "input", "label", "response", "query", "actions")
"""Columns of a row with a fixed meaning."""


def read_samples(path: Path) -> list[Sample]:
    """Read samples from a .jsonl or other data file.

    A row has a `prompt` (or `input`; text or chat messages), a `label`, a `response` or a `query`, and optionally
    `actions` for agents. Reward functions and agents receive its other columns as in training.

    Raises:
        ValueError: a row lacks a column, or has an invalid one. The message names the row.
    """
    samples = []
    for number, row in enumerate(read_records(path)):
        prompt = row.get("prompt", row.get("input", ""))
        label = row.get("label", "")
        columns = {name: value for name, value in row.items() if name not in ROW_KEYS}
        if are_messages(prompt):
            columns["prompt"] = prompt
            prompt = "\n".join(str(message["content"]) for message in prompt)
        prompt = str(prompt)
        if not row.keys() & {"prompt", "input", "query", "response"}:
            raise ValueError(f"{path}, row {number}: found the keys {sorted(row)}; add a prompt, query or response")
        query = row.get("query", "")
        response = row.get("response")
        if response is None and query:
            if not query.startswith(prompt):
                raise ValueError(f"{path}, row {number}: its query does not begin with its prompt; add a response")
            response = query[len(prompt) :]
        if response is None:
            response = str(label)  # a row with prompt and label only: the label serves as the response
        actions = row.get("actions", [])
        if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
            raise ValueError(f"{path}, row {number}: 'actions' must be a list of texts")
        samples.append(Sample(prompt, response, label, query, tuple(actions), columns))
    return samples


def repeated(samples: list[Sample], count: int) -> list[Sample]:
    """Return `count` samples, repeated from the beginning if there are fewer."""
    return [samples[place % len(samples)] for place in range(count)]

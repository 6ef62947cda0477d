"""Rows of prompts with labels, and the source that hands them out, shuffled, as token batches.

P prompts, N all tokens of a batch end to end. Loading and checking rows needs no torch: a recipe's `main.py`
does it before anything heavy starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.data.tasks import Split, get_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch

TASK_PREFIX = "task:"
DEFAULT_TASK_ROWS = 10_000
"""Prompts drawn from a task when the caller names no number."""

FILE_TYPES = (".json", ".jsonl", ".parquet")


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Read a list of objects from a .json, .jsonl or .parquet file."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"data file {str(path)!r} does not exist; give a {', '.join(FILE_TYPES)} file or task:<name>")
    if path.suffix == ".jsonl":
        records = [_parse_json(line, f"{path}, line {n}") for n, line in enumerate(_lines(path), 1) if line.strip()]
    elif path.suffix == ".json":
        records = _parse_json(path.read_text(encoding="utf-8"), str(path))
    elif path.suffix == ".parquet":
        # Most runs read no parquet; pyarrow is the slowest import on the way to an error message.
        import pyarrow.parquet

        records = pyarrow.parquet.read_table(path).to_pylist()
    else:
        raise ValueError(f"data file {str(path)!r} is none of {', '.join(FILE_TYPES)}; convert it to one of them")
    if not isinstance(records, list) or not records:
        raise ValueError(f"data file {str(path)!r} must hold a list of at least one object; it holds {_kind(records)}")
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise ValueError(f"data file {str(path)!r}, row {number}: expected an object, found {_kind(record)}")
    return records


def load_rows(
    source: str,
    input_key: str = "input",
    label_key: str | None = None,
    *,
    split: Split = "train",
    max_rows: int | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Load prompts as rows of `{"input", "label"}`.

    Args:
        source: `task:<name>`, or a .json, .jsonl or .parquet file.
        input_key: the field with the prompt: a string or a list of chat messages. A task needs no keys.
        label_key: the field handed to the scorer as the label; None means that every label is "".
        split: which prompts of a task; a file has only one split.
        max_rows: the first so many rows of a file, or how many to draw from a task.
        seed: for the drawing of a task's rows.
    """
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows={max_rows} leaves no data; set it to at least 1, or leave it unset")
    if source.startswith(TASK_PREFIX):
        count = DEFAULT_TASK_ROWS if max_rows is None else max_rows
        return [dict(row) for row in get_task(source.removeprefix(TASK_PREFIX)).rows(split, count, seed)]
    rows = []
    for number, record in enumerate(read_records(source)[:max_rows]):
        for key in (input_key, label_key):
            if key is not None and key not in record:
                raise ValueError(
                    f"{source}, row {number}: there is no field {key!r}, only {', '.join(map(repr, record))}; "
                    "set input_key and label_key to fields that every row has"
                )
        _check_prompt(record[input_key], f"{source}, row {number}, field {input_key!r}")
        rows.append({"input": record[input_key], "label": "" if label_key is None else record[label_key]})
    return rows


class TextEncoder:
    """Turns text into token ids, and refuses characters that a character tokenizer would silently lose."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._alphabet = _alphabet(tokenizer)
        # A slow property, and this class is called once per text.
        self._special_tokens = list(tokenizer.all_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Give the ids of `text`; special tokens written in the text count as such."""
        if self._alphabet is not None:
            plain = text
            for token in self._special_tokens:
                plain = plain.replace(token, "")
            lost = "".join(sorted(set(plain) - self._alphabet))
            if lost:
                raise ValueError(
                    f"the tokenizer has no token for the characters {lost!r} of {text!r}; it knows "
                    f"{''.join(sorted(self._alphabet))!r}: use a model that was made for this data"
                )
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def as_messages(prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Wrap a string as one user turn; chat messages stay as they are."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def render_prompt(
    prompt: str | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    apply_chat_template: bool = False,
    input_template: str | None = None,
) -> str:
    """Write out the text that the policy reads.

    Args:
        prompt: a string, or chat messages (these always go through the chat template).
        tokenizer: the owner of the chat template.
        apply_chat_template: treat a string as a user's turn and end with the start of the assistant's.
        input_template: text with one `{}` for a string prompt; not together with the chat template.
    """
    if apply_chat_template or not isinstance(prompt, str):
        if input_template is not None:
            raise ValueError("input_template and the chat template exclude each other; unset one of them")
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; set apply_chat_template=False and give prompts as strings"
            )
        text = tokenizer.apply_chat_template(as_messages(prompt), tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text
    # Not str.format: prompts of code and maths are full of braces of their own.
    return prompt if input_template is None else input_template.replace("{}", prompt, 1)


class PromptSource:
    """Hands out prompts without end: each epoch is every row once, in an order of its own.

    The order follows from the seed and the epoch, so the state is three numbers.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        *,
        shuffle: bool = True,
        apply_chat_template: bool = False,
        input_template: str | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """Set the source at the start of its first epoch.

        Args:
            rows: as `load_rows` gives them.
            tokenizer: turns text into ids.
            seed: of the order; unused without `shuffle`.
            shuffle: False keeps the order of the rows, as evaluation wants it.
            apply_chat_template: see `render_prompt`.
            input_template: see `render_prompt`; must hold `{}`.
            max_prompt_tokens: longer prompts are passed over and counted in `too_long`; None sets no limit.
        """
        if not rows:
            raise ValueError("the prompt source has no rows; give it at least one")
        if input_template is not None and input_template.count("{}") != 1:
            raise ValueError(f"input_template={input_template!r} must hold {{}} once, where the prompt goes")
        self.rows = rows
        self.tokenizer = tokenizer
        self.seed = seed
        self.shuffle = shuffle
        self.apply_chat_template = apply_chat_template
        self.input_template = input_template
        self.max_prompt_tokens = max_prompt_tokens
        self.epoch = 0
        """Whole passes over the rows so far."""
        self.position = 0
        """Rows of this epoch that were already handed out or passed over."""
        self.too_long = 0
        """Prompts passed over because they exceed `max_prompt_tokens`, all epochs together."""
        self._encoder = TextEncoder(tokenizer)
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Count the rows of one epoch."""
        return len(self.rows)

    def take(self, count: int) -> Batch:
        """Give the next `count` prompts, over the end of an epoch if need be.

        Returns:
            A batch of P = count prompts: `tokens` [N]; `prompt_id` [P] int64, which is
            epoch * len(rows) + row, so it never repeats in a run; `prompt` (the text) and `label` lists.
        """
        # Not at the top: a plan check loads rows without torch.
        import torch

        from components.batch import Batch

        if count < 1:
            raise ValueError(f"take({count}) asks for no prompts; ask for at least 1")
        tokens: list[list[int]] = []
        prompt_ids: list[int] = []
        prompts: list[str] = []
        labels: list[Any] = []
        passed_over = 0
        while len(tokens) < count:
            row = self._next_row()
            prompt, ids = self._encode(row)
            if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
                self.too_long += 1
                passed_over += 1
                if passed_over > len(self.rows):
                    raise ValueError(
                        f"all {len(self.rows)} prompts are longer than max_prompt_tokens={self.max_prompt_tokens}; "
                        f"the last one has {len(ids)}: raise it"
                    )
                continue
            passed_over = 0
            tokens.append(ids)
            prompt_ids.append(self.epoch * len(self.rows) + row)
            prompts.append(prompt)
            labels.append(self.rows[row]["label"])
        return Batch.from_rows(
            {"tokens": tokens},
            per_sequence={"prompt_id": torch.tensor(prompt_ids, dtype=torch.int64)},
            objects={"prompt": prompts, "label": labels},
        )

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` needs to go on with the very next prompt."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "too_long": self.too_long,
            "seed": self.seed,
            "rows": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another source with the same rows and seed stood."""
        mine = {"seed": self.seed, "rows": self._fingerprint()}
        for key, value in mine.items():
            if state[key] != value:
                raise ValueError(
                    f"the saved prompt order has {key}={state[key]!r}, this run has {value!r}; resume with the same "
                    "data and seed, or start anew"
                )
        self.epoch, self.position, self.too_long = state["epoch"], state["position"], state["too_long"]
        self._order = self._order_of(self.epoch)

    def _next_row(self) -> int:
        if self.position == len(self.rows):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)
        row = int(self._order[self.position])
        self.position += 1
        return row

    def _encode(self, row: int) -> tuple[str, list[int]]:
        source = self.rows[row]["input"]
        text = render_prompt(
            source,
            self.tokenizer,
            apply_chat_template=self.apply_chat_template,
            input_template=self.input_template,
        )
        # A chat template writes the special tokens itself; a second bos in front would be a different prompt.
        templated = self.apply_chat_template or not isinstance(source, str)
        ids = self._encoder.encode(text, add_special_tokens=not templated)
        if not ids:
            raise ValueError(f"row {row}: the prompt {text!r} has no tokens; the policy needs at least one")
        return text, ids

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.rows))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for row in self.rows:
            digest.update(repr(row["input"]).encode())
        return f"{len(self.rows)} rows, {digest.hexdigest()}"


def _alphabet(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Find the characters of a tokenizer whose every token is one character; None for any other."""
    largest_character_vocabulary = 256
    if len(tokenizer) > largest_character_vocabulary:
        return None
    special = set(tokenizer.all_special_ids)
    characters = [str(tokenizer.decode([index])) for index in range(len(tokenizer)) if index not in special]
    return frozenset(characters) if all(len(character) == 1 for character in characters) else None


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error}); mend or remove it") from error


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        return
    messages = list(prompt) if isinstance(prompt, Sequence) else []
    if not messages or not all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in messages):
        raise ValueError(
            f"{where}: expected a string or a list of {{role, content}} messages, found {_kind(prompt)}; "
            "set input_key to the field with the prompt"
        )


def _kind(value: Any) -> str:
    if isinstance(value, (list, dict, str)):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__} ({value!r})"

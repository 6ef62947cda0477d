"""Prompts with labels from one or several sources, as shuffled token batches.

Shape suffixes: P prompts; N all tokens of a batch end to end. Loading and checking rows does not import torch, because
a recipe's `main.py` does it before it starts anything that takes long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from components.data.messages import ASSISTANT, CHAT, TOOLS, check_prompt, needs_template
from components.data.mixture import Note, first_rows, mixer, source_names
from components.data.shown import MOST_CHARACTERS, described
from components.data.sources import DEFAULT_ROWS, READER, Split, data_source
from components.data.text import TextEncoder, render_prompt
from components.registry import load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch

DEFAULT_INPUT = "input"
"""Column of the prompt if the caller names none."""
DEFAULT_DATASOURCE = "default"
"""Data source of rows without a column `datasource`."""
Overlong = Literal["leave_out", "left", "right", "middle"]
"""Treatment of a prompt that is too long: leave it out, or remove tokens on this side."""


def load_rows(
    source: str,
    prompt_key: str = DEFAULT_INPUT,
    label_key: str | None = None,
    *,
    split: str | None = None,
    heldout: bool = False,
    max_rows: int | None = None,
    seed: int = 0,
    probs: str | None = None,
    note: Note | None = None,
    ignored: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Load prompts as rows of `{"input", "label", "datasource"}`, with `extra_info` if the data has further columns.

    A row also has `system`, a system prompt, and `tools`, definitions for the chat template, if columns with these
    meanings hold them. `columns` lists the columns that its prompt was read from. `datasource` is the origin of a row:
    the name of a task, the row's field `datasource`, or "default".

    Args:
        source: comma-separated sources. Each is a source of `read_records`, or `<scheme>:<name>` of a plug-in that
            generates rows, such as `task:sort` (see components/data/sources.py).
        prompt_key: field with the prompt: a string or a list of chat messages. Generated rows need no keys.
        label_key: field with the label for the scorer. Dots select a nested field. None sets every label to "".
        split: split of every source. None selects "train", and "heldout" of generated rows if `heldout` is True.
        heldout: True if the rows are for evaluation.
        max_rows: maximum number of rows in total. A generated source draws exactly this number if it is the only one.
        seed: seed of generated rows and of the order of a mixture.
        probs: comma-separated positive numbers that sum to 1, the probability of each source for the next row. Rows are
            drawn until every row of every source was used, so rows of small sources occur more than once. None
            concatenates the sources.
        note: called with a sentence for each source of which `max_rows` leaves rows out.
        ignored: columns that the policy must not read, although their names have a well-known meaning.

    Raises:
        ValueError: a source cannot be read, or a row has no prompt or no label. The message names the row.
    """
    names = source_names(source)
    mixed = mixer(probs, len(names))
    generated_split = split or "train"
    if heldout:
        generated_split = split or "heldout"
    count = DEFAULT_ROWS if max_rows is None else max_rows
    # In a mixture with files, a generated source should not dominate only because it has no end.
    if len(names) > 1:
        count = min(count, DEFAULT_ROWS)
    parts: list[list[dict[str, Any]]] = []
    for name in names:
        generator = data_source(name)
        if generator is not None:
            parts.append(generator.prompts(cast(Split, generated_split), count, seed))
        else:
            # A mixture of max_rows rows never uses more than the first max_rows rows of a source.
            read_prompts = load(READER, "prompts", f"data={name}")
            parts.append(read_prompts(name, prompt_key, label_key, split or "train", max_rows, note, ignored))
    return _with_all_columns(first_rows(mixed(parts, seed), max_rows, source, note))


@dataclass(eq=False)
class PromptSource:
    """Endless source of prompts. Each epoch yields every row that is short enough once, in an order of its own.

    The order is a function of the seed and the epoch, so the state is two numbers.
    """

    rows: Sequence[Mapping[str, Any]]
    """Rows of `load_rows`."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""
    seed: int
    """Seed of the order. Unused without `shuffle`."""
    _: KW_ONLY
    shuffle: bool = True
    """Shuffle each epoch. False keeps the order of the rows, as needed for evaluation."""
    apply_chat_template: bool = False
    """See `render_prompt`."""
    input_template: str | None = None
    """See `render_prompt`. Contains `{}` once."""
    max_prompt_tokens: int | None = None
    """Maximum number of tokens. Longer prompts are left out and counted in `too_long`, or truncated and counted in
    `cut`. None sets no limit."""
    overlong: Overlong = "leave_out"
    """Leave out longer prompts, or remove tokens at their start (left), at their end (right), or between the first and
    the second half of the remaining tokens (middle)."""
    picker: Callable[[range], list[tuple[int, int]]] | None = None
    """(numbers of the prompts over all epochs) -> a pair (epoch, row) for each. It replaces the shuffled order."""

    def __post_init__(self) -> None:
        """Encode every prompt once, find those that are too long, and start the first epoch.

        Raises:
            ValueError: a prompt cannot be rendered or encoded (the message names its row), or all are too long.
        """
        if not self.rows:
            raise ValueError("the prompt source has no rows; give it at least one")
        self.taken = 0
        """Number of prompts taken so far, over all epochs. The position in the epoch follows from it."""
        self._encoder = TextEncoder(self.tokenizer)
        # All prompts are encoded once at the start, so that a bad row fails the run before training and not during it.
        lengths = np.fromiter(self._lengths(), dtype=np.int64, count=len(self.rows))
        self.longest = int(lengths.argmax()), int(lengths.max())
        """Row of the longest prompt, and its number of tokens before truncation."""
        self.kept = self._find_kept(lengths)
        """Bool mask of the rows that are not left out."""
        self.too_long = int((~self.kept).sum())
        """Number of rows left out because they exceed `max_prompt_tokens`."""
        self.cut = 0
        """Number of rows that are truncated to `max_prompt_tokens`."""
        self.longest_kept = int(lengths[self.kept].max())
        """Number of tokens of the longest prompt after truncation."""
        if self.max_prompt_tokens is not None:
            self.cut = int((lengths[self.kept] > self.max_prompt_tokens).sum())
            self.longest_kept = min(self.longest_kept, self.max_prompt_tokens)
        self._has_extra = any("extra_info" in row for row in self.rows)
        inputs = [row["input"] for row in self.rows if not isinstance(row["input"], str)]
        self.prefilled = sum(messages[-1]["role"] == ASSISTANT for messages in inputs)
        """Number of rows whose prompt ends with a message of the assistant, which the policy continues."""
        self._order = 0, self._shuffled(0)

    def __len__(self) -> int:
        """Return the number of prompts of one epoch."""
        return len(self.rows) - self.too_long

    @property
    def epoch(self) -> int:
        """Epoch of the prompt that was taken last, from 0."""
        return max(self.taken - 1, 0) // len(self)

    def left(self, passes: int) -> int:
        """Return the number of prompts that remain out of `passes` epochs."""
        return max(passes * len(self) - self.taken, 0)

    def take(self, count: int) -> Batch:
        """Return the next `count` prompts, across the end of an epoch if needed.

        Returns:
            A batch of P = count prompts: `tokens` [N]; `prompt_id` [P] int64, which is epoch * rows + row and includes
            rows that are left out, so it is unique within a run; lists `prompt` (text, after truncation), `label` and
            `datasource`; and `extra_info` if any row has it (None for a row without it).
        """
        # Imported here, because a plan check loads rows without torch.
        import torch

        from components.batch import Batch

        numbers = range(self.taken, self.taken + count)
        picks = self.picker(numbers) if self.picker else list(map(self._row_at, numbers))
        row_numbers = [row for _, row in picks]
        prompt_ids = [epoch * len(self.rows) + row for epoch, row in picks]
        self.taken += count
        prompts, tokens = self._prompts(row_numbers)
        rows = [self.rows[row] for row in row_numbers]
        objects: dict[str, list[Any]] = {
            "prompt": prompts,
            "label": [row["label"] for row in rows],
            "datasource": [row.get("datasource", DEFAULT_DATASOURCE) for row in rows],
        }
        if self._has_extra:
            objects["extra_info"] = [row.get("extra_info") for row in rows]
        prompt_id_P = torch.tensor(prompt_ids, dtype=torch.int64)
        return Batch.from_rows({"tokens": tokens}, per_sequence={"prompt_id": prompt_id_P}, objects=objects)

    def first(self) -> tuple[str, list[int]]:
        """Return the next prompt as text and as ids, without taking it."""
        _, row = self._row_at(self.taken)
        prompts, tokens = self._prompts([row])
        return prompts[0], tokens[0]

    def describe_first(self, limit: int = MOST_CHARACTERS) -> str:
        """Describe `first()` in one line."""
        return f"first prompt {described(*self.first(), limit)}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which `load_state_dict` continues with the next prompt."""
        position = self.taken - self.epoch * len(self)
        return {"epoch": self.epoch, "position": position, "seed": self.seed, "rows": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a source with the same rows and seed.

        Raises:
            ValueError: the rows or the seed differ.
        """
        expected = {"seed": self.seed, "rows": self._fingerprint}
        for key, value in expected.items():
            if state[key] != value:
                raise ValueError(
                    f"the saved prompt order has {key}={state[key]!r}, this run has {value!r}; resume with the same "
                    "data, seed and length limit, or start anew"
                )
        self.taken = state["epoch"] * len(self) + state["position"]

    def _row_at(self, number: int) -> tuple[int, int]:
        """Return the epoch and the row of the prompt with this number, counted from 0 over all epochs."""
        epoch, position = divmod(number, len(self))
        # Only the current order is kept: the order of any epoch can be computed again.
        if self._order[0] != epoch:
            self._order = epoch, self._shuffled(epoch)
        return epoch, int(self._order[1][position])

    def _find_kept(self, lengths: np.ndarray) -> np.ndarray:
        """Return a mask of the rows that are not left out.

        Raises:
            ValueError: all rows would be left out.
        """
        if self.max_prompt_tokens is None or self.overlong != "leave_out":
            return np.ones(len(lengths), dtype=bool)
        kept = lengths <= self.max_prompt_tokens
        if not kept.any():
            raise ValueError(
                f"all {len(lengths)} prompts are longer than max_prompt_tokens={self.max_prompt_tokens}; the shortest "
                f"has {lengths.min()} tokens: raise it"
            )
        return kept

    def _lengths(self) -> Iterator[int]:
        """Yield the number of tokens of each prompt, in one pass that keeps no ids."""
        # Large enough for a fast tokenizer call, and small enough for the ids to fit into memory.
        chunk = 1024
        for begin in range(0, len(self.rows), chunk):
            _, tokens = self._encode(range(begin, min(begin + chunk, len(self.rows))))
            yield from map(len, tokens)

    def _prompts(self, rows: Sequence[int]) -> tuple[list[str], list[list[int]]]:
        """Render, encode and truncate prompts. The text of a truncated prompt is decoded from its remaining tokens."""
        texts, tokens = self._encode(rows)
        for i, ids in enumerate(tokens):
            if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
                tokens[i] = _cut(ids, self.max_prompt_tokens, self.overlong)
                texts[i] = str(self.tokenizer.decode(tokens[i]))
        return texts, tokens

    def _encode(self, rows: Sequence[int]) -> tuple[list[str], list[list[int]]]:
        """Render and encode prompts. Errors name the row."""
        texts: list[str] = []
        for row in rows:
            check_prompt(self.rows[row]["input"], f"row {row}")
            try:
                text = self._render(self.rows[row])
            except ValueError as error:
                raise ValueError(f"row {row}: {error}") from error
            texts.append(text)
        tokens = self._encoder.encode_prompts(texts, rows)
        for row, text, ids in zip(rows, texts, tokens):
            if not ids:
                raise ValueError(f"row {row}: the prompt {text!r} has no tokens; the policy needs at least one")
        return texts, tokens

    def _render(self, row: Mapping[str, Any]) -> str:
        """Render a prompt with its system prompt and its tools.

        Raises:
            ValueError: a system prompt or tools would not be written, because the prompt does not go through the chat
                template.
        """
        prompt = row["input"]
        tools = row.get(TOOLS, ())
        system = row.get("system")
        # Plain text does not go through the chat template, so there is no place for tools or a system prompt.
        is_plain = isinstance(prompt, str) and not self.apply_chat_template
        if is_plain and tools:
            raise needs_template(TOOLS, tools)
        if is_plain and system is not None and system.strip() not in prompt:
            raise needs_template(row["system_column"], system)
        if not is_plain and (tools or system is not None):
            prompt = load(CHAT, "messages", "data.apply_chat_template=true")(prompt, system, tools, self.tokenizer)
        return render_prompt(
            prompt,
            self.tokenizer,
            apply_chat_template=self.apply_chat_template,
            input_template=self.input_template,
            tools=tools,
            continue_final_message=True,
        )

    def _shuffled(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.flatnonzero(self.kept)
        # A permutation of all rows, so that the order of the kept rows does not depend on the number of left-out rows.
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        return order[self.kept[order]]

    @cached_property
    def _fingerprint(self) -> str:
        # It includes the mask of kept rows, because another length limit changes the order of prompts.
        digest = hashlib.blake2b(self.kept.tobytes(), digest_size=8)
        for row in self.rows:
            digest.update(repr((row["input"], row["label"])).encode())
            if others := [row[name] for name in ("system", TOOLS) if name in row]:
                digest.update(repr(others).encode())
        return f"{len(self.rows)} rows, {digest.hexdigest()}"


def _with_all_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every row all further columns of the data, with None for a missing one, as in a table.

    Otherwise a reward function would miss a column among its arguments in every batch whose rows all lack it.
    """
    columns: dict[str, None] = {name: None for row in rows for name in row.get("extra_info") or {}}
    for row in rows:
        if len(row.get("extra_info") or {}) < len(columns):
            row["extra_info"] = columns | (row.get("extra_info") or {})
    return rows


def _cut(ids: list[int], most: int, side: Overlong) -> list[int]:
    if side == "left":
        return ids[-most:]
    if side == "right":
        return ids[:most]
    head = most // 2
    return ids[:head] + ids[len(ids) - most + head :]

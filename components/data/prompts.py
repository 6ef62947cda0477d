"""Rows of prompts with labels, blended from any number of sources, handed out, shuffled, as token batches.

P prompts, N all tokens of a batch end to end. Loading and checking rows needs no torch: a recipe's `main.py`
does it before anything heavy starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from components.data.columns import TOOLS, needs_template
from components.data.messages import ASSISTANT, as_messages, with_system
from components.data.mixture import Note, first_rows, mixed, mixture_probabilities, source_names
from components.data.prompt_rows import DEFAULT_DATASOURCE, DEFAULT_INPUT, check_prompt, read_rows
from components.data.records import read_records
from components.data.shown import MOST_CHARACTERS, described
from components.data.sources import DEFAULT_ROWS, Split, data_source
from components.data.text import TextEncoder, check_tools_written, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch

Overlong = Literal["leave_out", "left", "right", "middle"]
"""What becomes of a prompt that is too long: it is left out, or tokens are cut away on that side of it."""


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
    """Load prompts as rows of `{"input", "label", "datasource"}`, with `extra_info` where there are further columns.

    A row also has `system`, a system prompt, and `tools`, definitions for the chat template, where columns of these
    names hold them, and `columns`, the names of those that its prompt is made of.

    `datasource` says where a row came from: a task's name, the row's own field `datasource`, or "default".

    Args:
        source: parts with commas between them; each is what `read_records` takes, or `<scheme>:<name>` of a plug-in
            that draws rows, such as `task:sort` (see components/data/sources.py).
        prompt_key: the field with the prompt: a string or a list of chat messages. Drawn rows need no keys.
        label_key: the field handed to the scorer as the label, with dots a field of a field; None means that every
            label is "".
        split: of every part; None is "train", and "heldout" of drawn rows where `heldout` is set.
        heldout: the rows are for evaluation.
        max_rows: the first so many rows in all; a drawn source that is the only part draws exactly so many.
        seed: for drawing and for blending.
        probs: with which probability the next row comes from which part: a positive number for each, with commas
            between them, 1 in all. They continue until every row of every part was used, so those of small parts come
            more than once. None lays the parts end to end.
        note: is called with a sentence for each source of which `max_rows` leaves rows out.
        ignored: columns that the policy is not to read, although their names have a well-known meaning.
    """
    names = source_names(source)
    probabilities = mixture_probabilities(probs, len(names))
    parts: list[list[dict[str, Any]]] = []
    for name in names:
        drawn = data_source(name)
        if drawn is not None:
            count = DEFAULT_ROWS if max_rows is None else max_rows
            if len(names) > 1:
                count = min(count, DEFAULT_ROWS)
            drawn_split = split or ("heldout" if heldout else "train")
            parts.append(drawn.prompts(cast(Split, drawn_split), count, seed))
        else:
            # More than the first max_rows of a part are never among the first max_rows of a blend.
            records = read_records(name, split=split or "train", label_key=label_key)
            records = first_rows(records, max_rows, name, note)
            parts.append(read_rows(records, name, prompt_key, label_key, ignored))
    return _with_all_columns(first_rows(mixed(parts, probabilities, seed), max_rows, source, note))


@dataclass(eq=False)
class PromptSource:
    """Hands out prompts without end: each epoch is every row that is short enough once, in an order of its own.

    The order follows from the seed and the epoch, so the state is two numbers.
    """

    rows: Sequence[Mapping[str, Any]]
    """As `load_rows` gives them; they may have `extra_info` besides."""
    tokenizer: PreTrainedTokenizerBase
    """Turns text into ids."""
    seed: int
    """Of the order; unused without `shuffle`."""
    _: KW_ONLY
    shuffle: bool = True
    """False keeps the order of the rows, as evaluation wants it."""
    apply_chat_template: bool = False
    """See `render_prompt`."""
    input_template: str | None = None
    """See `render_prompt`; holds `{}` once."""
    max_prompt_tokens: int | None = None
    """Longer prompts are left out and counted in `too_long`, or cut and counted in `cut`; None sets no limit."""
    overlong: Overlong = "leave_out"
    """Which of the two. What is cut away may be the beginning (left), the end (right), or what is between the first
    and the last half of the tokens that stay (middle)."""

    def __post_init__(self) -> None:
        """Read every prompt once, find those that are too long, and stand at the start of the first epoch.

        Raises:
            ValueError: a prompt cannot be written out or encoded, with the number of its row; or all are too long.
        """
        if not self.rows:
            raise ValueError("the prompt source has no rows; give it at least one")
        self.taken = 0
        """Prompts handed out so far, over all epochs; the next one follows from it."""
        self._encoder = TextEncoder(self.tokenizer)
        lengths = np.fromiter(self._lengths(), dtype=np.int64, count=len(self.rows))
        self.longest = int(lengths.argmax()), int(lengths.max())
        """The row of the longest prompt, and its tokens before any are cut away."""
        self._kept = self._find_kept(lengths)
        self.too_long = int((~self._kept).sum())
        """Rows left out because they exceed `max_prompt_tokens`."""
        limit = self.max_prompt_tokens
        self.cut = 0 if limit is None else int((lengths[self._kept] > limit).sum())
        """Rows that are cut because they exceed it."""
        longest = int(lengths[self._kept].max())
        self.longest_kept = longest if limit is None else min(longest, limit)
        """Tokens of the longest prompt that is handed out."""
        self._has_extra = any("extra_info" in row for row in self.rows)
        self.prefilled = sum(_is_prefilled(row["input"]) for row in self.rows)
        """Rows whose prompt ends with a message of the assistant, which the policy continues."""
        self._order = 0, self._shuffled(0)

    def __len__(self) -> int:
        """Count the prompts of one epoch."""
        return len(self.rows) - self.too_long

    @property
    def epoch(self) -> int:
        """The epoch of the prompt that was handed out last, counted from 0."""
        return max(self.taken - 1, 0) // len(self)

    def left(self, passes: int) -> int:
        """Count the prompts that were not yet handed out, of so many epochs in all."""
        return max(passes * len(self) - self.taken, 0)

    def take(self, count: int) -> Batch:
        """Give the next `count` prompts, over the end of an epoch if need be.

        Returns:
            A batch of P = count prompts: `tokens` [N]; `prompt_id` [P] int64, which is epoch * rows + row, counting
            those left out too, so it never repeats in a run; `prompt` (the text, of what was cut what is left),
            `label` and `datasource` lists, and `extra_info` (None of a row without it) where rows have it.
        """
        # Not at the top: a plan check loads rows without torch.
        import torch

        from components.batch import Batch

        taken: list[int] = []
        prompt_ids: list[int] = []
        for place in range(self.taken, self.taken + count):
            epoch, row = self._row_at(place)
            taken.append(row)
            prompt_ids.append(epoch * len(self.rows) + row)
        self.taken += count
        prompts, tokens = self._prompts(taken)
        extra = {"extra_info": [self.rows[row].get("extra_info") for row in taken]} if self._has_extra else {}
        return Batch.from_rows(
            {"tokens": tokens},
            per_sequence={"prompt_id": torch.tensor(prompt_ids, dtype=torch.int64)},
            objects={
                "prompt": prompts,
                "label": [self.rows[row]["label"] for row in taken],
                "datasource": [self.rows[row].get("datasource", DEFAULT_DATASOURCE) for row in taken],
                **extra,
            },
        )

    def first(self) -> tuple[str, list[int]]:
        """Give the prompt that `take` will hand out next, as text and as ids, without taking it."""
        _, row = self._row_at(self.taken)
        prompts, tokens = self._prompts([row])
        return prompts[0], tokens[0]

    def describe_first(self, limit: int = MOST_CHARACTERS) -> str:
        """Show `first()` in one line."""
        return f"first prompt {described(*self.first(), limit)}"

    def check_savable(self) -> None:
        """See that batches with these labels can be written to a file, which a queue of them is at each checkpoint.

        Raises:
            ValueError: they cannot.
        """
        from components.batch import Batch

        first = {name: [self.rows[0][name]] for name in ("label", "extra_info") if name in self.rows[0]}
        try:
            Batch.from_rows({"tokens": [[0]]}, objects=first).to_table()
        except ValueError as error:
            raise ValueError(
                f"batches are generated ahead, and no checkpoint can hold their labels or columns ({error}); make "
                "these text, numbers, lists or objects of these, or train without asynchronous.enabled (async_train)"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` needs to continue with the very next prompt."""
        position = self.taken - self.epoch * len(self)
        return {"epoch": self.epoch, "position": position, "seed": self.seed, "rows": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another source with the same rows and seed stood."""
        mine = {"seed": self.seed, "rows": self._fingerprint}
        for key, value in mine.items():
            if state[key] != value:
                raise ValueError(
                    f"the saved prompt order has {key}={state[key]!r}, this run has {value!r}; resume with the same "
                    "data, seed and length limit, or start anew"
                )
        self.taken = state["epoch"] * len(self) + state["position"]

    def _row_at(self, place: int) -> tuple[int, int]:
        """The epoch and the row of the prompt before which `place` were handed out."""
        epoch, position = divmod(place, len(self))
        if self._order[0] != epoch:
            self._order = epoch, self._shuffled(epoch)
        return epoch, int(self._order[1][position])

    def _find_kept(self, lengths: np.ndarray) -> np.ndarray:
        """Tell for each row whether it is handed out."""
        limit = self.max_prompt_tokens if self.overlong == "leave_out" else None
        kept = np.ones(len(lengths), dtype=bool) if limit is None else lengths <= limit
        if not kept.any():
            raise ValueError(
                f"all {len(lengths)} prompts are longer than max_prompt_tokens={limit}; the shortest has "
                f"{lengths.min()} tokens: raise it"
            )
        return kept

    def _lengths(self) -> Iterator[int]:
        """Tokens of each prompt, in one pass that keeps no ids."""
        # As many as the tokenizer needs to be worth calling, and few enough to hold.
        chunk = 1024
        for begin in range(0, len(self.rows), chunk):
            _, tokens = self._encode(range(begin, min(begin + chunk, len(self.rows))))
            yield from map(len, tokens)

    def _prompts(self, rows: Sequence[int]) -> tuple[list[str], list[list[int]]]:
        """Write out and encode prompts, and cut those that are too long; their text is that of what is left."""
        texts, tokens = self._encode(rows)
        for i, ids in enumerate(tokens):
            if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
                tokens[i] = _cut(ids, self.max_prompt_tokens, self.overlong)
                texts[i] = str(self.tokenizer.decode(tokens[i]))
        return texts, tokens

    def _encode(self, rows: Sequence[int]) -> tuple[list[str], list[list[int]]]:
        """Write out and encode prompts; an error says which row it is about."""
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
        """Write out a prompt with its system prompt and its tools."""
        prompt, tools, system = row["input"], row.get(TOOLS, ()), row.get("system")
        is_plain = isinstance(prompt, str) and not self.apply_chat_template
        if is_plain and tools:
            raise needs_template(TOOLS, tools)
        if is_plain and system is not None and system.strip() not in prompt:
            raise needs_template(row["system_column"], system)
        if not is_plain and system is not None:
            prompt = with_system(as_messages(prompt), system)
        if tools:
            check_tools_written(as_messages(prompt), tools, self.tokenizer)
        return render_prompt(
            prompt,
            self.tokenizer,
            apply_chat_template=self.apply_chat_template,
            input_template=self.input_template,
            tools=tools,
            continue_final_message=True,
        )

    def _shuffled(self, epoch: int) -> np.ndarray:
        count = len(self.rows)
        # Of all rows, so that the order of those that stay does not hang on how many are left out.
        order = np.random.default_rng([self.seed, epoch]).permutation(count) if self.shuffle else np.arange(count)
        return order[self._kept[order]]

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(self._kept.tobytes(), digest_size=8)
        for row in self.rows:
            digest.update(repr((row["input"], row["label"])).encode())
            if others := [row[name] for name in ("system", TOOLS) if name in row]:
                digest.update(repr(others).encode())
        return f"{len(self.rows)} rows, {digest.hexdigest()}"


def _with_all_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every row all further columns of the data, None where its file or line lacks one, as a table has them.

    Otherwise a reward function would lack a column of its parameters wherever no row beside it has that column.
    """
    columns: dict[str, None] = {name: None for row in rows for name in row.get("extra_info") or {}}
    for row in rows:
        if len(row.get("extra_info") or {}) < len(columns):
            row["extra_info"] = columns | (row.get("extra_info") or {})
    return rows


def _cut(ids: list[int], most: int, side: Overlong) -> list[int]:
    if side == "left":
        return ids[-most:]
    head = most if side == "right" else most // 2
    return ids[:head] + ids[len(ids) - most + head :]


def _is_prefilled(prompt: str | Sequence[Mapping[str, Any]]) -> bool:
    return not isinstance(prompt, str) and prompt[-1]["role"] == ASSISTANT

"""Demonstrations as token batches: which tokens are there, and which of them are learnt.

B sequences, N all tokens of a batch end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from components.batch import Batch
from components.data.cells import check_one_kind, text_or_messages
from components.data.mixture import Note, first_rows
from components.data.records import read_records
from components.data.tasks import get_task
from components.data.text import TextEncoder, are_messages, as_messages, render_conversation, render_prompt


@dataclass(frozen=True, kw_only=True)
class DemonstrationFormat:
    """Where a row has its demonstration, and how it is written out."""

    prompt_key: str | None = None
    """Column of the prompt, text or chat messages; where there is no `response_key`, of whole conversations. None:
    `prompt` or `input`, or `messages` in rows that have these."""
    response_key: str | None = None
    """Column of the response, text or chat messages. None: `response` or `output`, or none beside a
    `prompt_key`."""
    apply_chat_template: bool = False
    """Take prompt and response as a user's and an assistant's turn. Chat messages always go through the template."""
    input_template: str | None = None
    """Text with one `{}` for a prompt that does not go through the chat template."""
    multiturn: bool = True
    """Learn every turn of the assistant in a conversation; otherwise only the last one."""
    plain_text: bool = False
    """Rows are texts, in `prompt_key`, `text` or `input`, of which every token is learnt."""

    def of(self, source: str) -> DemonstrationFormat:
        """The format of a source's rows: a task's have it where they always do."""
        if not source.startswith("task:"):
            return self
        return replace(self, prompt_key=None, response_key=None, plain_text=False)

    def read(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A row as `{"messages"}`, `{"prompt", "response"}` or `{"text"}`.

        Raises:
            ValueError: a column is missing or holds something else.
        """
        columns = self._columns(record)
        missing = [name for name in columns.values() if name not in record]
        if missing:
            raise ValueError(
                f"the column {missing[0]!r} is null or absent; there are {sorted(map(str, record))}; set "
                "data.prompt_key and data.response_key, or give 'messages'"
            )
        mend = "set data.response_key or data.prompt_key to another column, or mend the row"
        row = {kind: text_or_messages(record[name], f"column {name!r}", mend) for kind, name in columns.items()}
        _check_row(row)
        return row

    def _columns(self, record: Mapping[str, Any]) -> dict[str, str]:
        """What a demonstration consists of -> the column that has it."""
        if self.plain_text:
            return {"text": self.prompt_key or ("input" if "input" in record else "text")}
        if self.response_key is not None:
            return {"prompt": self.prompt_key or "prompt", "response": self.response_key}
        if self.prompt_key is not None or "messages" in record:
            return {"messages": self.prompt_key or "messages"}
        if "input" in record and "prompt" not in record:
            return {"prompt": "input", "response": "output"}
        return {"prompt": "prompt", "response": "response"}


@dataclass(frozen=True)
class SupervisedData:
    """Encoded demonstrations, and the count of what could not be used."""

    batch: Batch
    """B sequences in the order of their rows: `tokens` [N], `loss_mask` [N] bool, True on what is learnt;
    `row` [B] int64, where each came from."""
    kept: int
    """Rows in the batch, which is B."""
    dropped: dict[str, int]
    """Rows left out, counted by reason: `too_long` (above max_tokens), `nothing_to_learn` (no assistant turn)."""
    cut: int = 0
    """Plain texts whose end was cut away."""


@dataclass(frozen=True)
class _Example:
    tokens: list[int]
    loss_mask: list[bool]


def load_demonstrations(
    source: str | Path,
    form: DemonstrationFormat = DemonstrationFormat(),
    *,
    split: str = "train",
    max_rows: int | None = None,
    seed: int = 0,
    note: Note | None = None,
) -> list[dict[str, Any]]:
    """Read rows, as `DemonstrationFormat.read` gives them, from what `read_records` takes, or draw those of
    `task:<name>`: 10,000, or `max_rows`. `note` is called with a sentence if `max_rows` leaves rows out.

    Raises:
        ValueError: the source cannot be read, or a row has no demonstration. It names the row.
    """
    kind, _, task = str(source).partition(":")
    if kind == "task":
        return list(get_task(task).demonstrations(max_rows or 10_000, seed))
    rows = []
    for number, record in enumerate(first_rows(read_records(source, split=split), max_rows, str(source), note)):
        try:
            rows.append(form.read(record))
        except ValueError as error:
            raise ValueError(f"{source}, row {number}: {error}") from error
    for kind in ("prompt", "response"):
        check_one_kind((row.get(kind) for row in rows), f"{source}, its {kind}s")
    return rows


def encode_demonstrations(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    form: DemonstrationFormat = DemonstrationFormat(),
    *,
    max_tokens: int | None = None,
) -> SupervisedData:
    """Tokenize demonstrations and mark what is learnt: responses, each with one end token.

    A row of `{"prompt", "response"}` is the prompt's text, the response and the end token. A row of
    `{"messages"}` goes through the chat template; of every learnt turn all tokens up to and including its
    first end token are learnt, and what follows the last learnt token is left off. A row of `{"text"}` is learnt whole,
    without an end token.

    Args:
        rows: as `load_demonstrations` or a task gives them.
        tokenizer: must have an end token.
        form: how prompts and responses are written out.
        max_tokens: longer sequences are dropped and counted, and only plain texts are cut; None sets no limit.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end token (eos); a policy trained without one never stops: set it")
    encoder = TextEncoder(tokenizer)
    dropped = {"too_long": 0, "nothing_to_learn": 0}
    cut = 0
    kept: list[tuple[int, _Example]] = []
    for number, row in enumerate(rows):
        try:
            example = _encode(row, encoder, form)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
        is_long = max_tokens is not None and len(example.tokens) > max_tokens
        if is_long and "text" in row:
            example = _Example(example.tokens[:max_tokens], example.loss_mask[:max_tokens])
            cut += 1
        if not any(example.loss_mask):
            dropped["nothing_to_learn"] += 1
        elif is_long and "text" not in row:
            dropped["too_long"] += 1
        else:
            kept.append((number, example))
    if not kept:
        raise ValueError(
            f"none of the {len(rows)} demonstrations can be used (dropped: {dropped}); raise data.max_tokens"
        )
    batch = Batch.from_rows(
        {
            "tokens": [example.tokens for _, example in kept],
            "loss_mask": [torch.tensor(example.loss_mask, dtype=torch.bool) for _, example in kept],
        },
        per_sequence={"row": torch.tensor([number for number, _ in kept], dtype=torch.int64)},
    )
    return SupervisedData(batch=batch, kept=len(kept), dropped=dropped, cut=cut)


def check_demonstrations(
    rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, form: DemonstrationFormat
) -> None:
    """Check that each row can be written out and encoded with tokens that the model has.

    Raises:
        ValueError: one cannot. It names the row.
    """
    encoder = TextEncoder(tokenizer)
    for number, row in enumerate(rows):
        try:
            _encode(row, encoder, form)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error


def _encode(row: Mapping[str, Any], encoder: TextEncoder, form: DemonstrationFormat) -> _Example:
    if "text" in row:
        tokens = encoder.encode_prompt(row["text"])
        # Nothing says how likely the first token is.
        return _Example(tokens, [index > 0 for index in range(len(tokens))])
    if "messages" in row:
        before, after = [], as_messages(row["messages"])
    elif form.apply_chat_template or not isinstance(row["response"], str):
        response = row["response"]
        before = as_messages(row["prompt"])
        after = [{"role": "assistant", "content": response}] if isinstance(response, str) else as_messages(response)
    else:
        return _encode_pair(row, encoder, form.input_template)
    turns = [len(before) + index for index, message in enumerate(after) if message["role"] == "assistant"]
    return _encode_messages([*before, *after], encoder, turns if form.multiturn else turns[-1:])


def _encode_pair(row: Mapping[str, Any], encoder: TextEncoder, input_template: str | None) -> _Example:
    tokenizer = encoder.tokenizer
    templated = not isinstance(row["prompt"], str)
    text = render_prompt(row["prompt"], tokenizer, input_template=None if templated else input_template)
    # Prompt and response are tokenized apart, as at generation time the prompt's ids are fixed by then.
    prompt_ids = encoder.encode_prompt(text)
    response_ids = encoder.encode(row["response"])
    while response_ids and response_ids[-1] == tokenizer.eos_token_id:
        response_ids.pop()
    if not response_ids or response_ids[-1] not in encoder.end_ids:
        response_ids.append(_eos(tokenizer))
    return _Example(prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids))


def _encode_messages(messages: list[dict[str, Any]], encoder: TextEncoder, learnt_turns: Sequence[int]) -> _Example:
    """Render the conversation turn by turn, so that the tokens of each turn that is learnt are known exactly."""
    tokenizer = encoder.tokenizer
    tokens: list[int] = []
    mask: list[bool] = []
    done = ""
    for index in learnt_turns:
        opened = render_prompt(messages[:index], tokenizer) if index else ""
        closed = render_conversation(messages[: index + 1], tokenizer)
        if not (opened.startswith(done) and closed.startswith(opened)):
            raise ValueError(
                f"the chat template writes the turns before turn {index} differently once it is added "
                "(some drop earlier reasoning), so no text fits all turns; keep one assistant turn per row, or set "
                "data.multiturn=false"
            )
        before = encoder.encode(opened[len(done) :]) if done else encoder.encode_prompt(opened)
        response = encoder.encode(closed[len(opened) :])
        if not opened and before == response[:1]:
            # Nothing stands before an assistant's first turn but the BOS, which the template writes as well.
            response = response[1:]
        # The end of a turn may be another token than the tokenizer's end token.
        learnt = next((place + 1 for place, token in enumerate(response) if token in encoder.end_ids), len(response))
        tokens += before + response
        mask += [False] * len(before) + [True] * learnt + [False] * (len(response) - learnt)
        done = closed
    if True in mask:
        end = len(mask) - mask[::-1].index(True)
        tokens, mask = tokens[:end], mask[:end]
        if tokens[-1] not in encoder.end_ids:
            tokens, mask = [*tokens, _eos(tokenizer)], [*mask, True]
    return _Example(tokens, mask)


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    assert isinstance(tokenizer.eos_token_id, int)
    return tokenizer.eos_token_id


def _check_row(row: Mapping[str, Any]) -> None:
    if "messages" in row:
        if not are_messages(row["messages"]):
            raise ValueError(
                f"'messages' must be a list of {{role, content}}, found {row['messages']!r:.80}; set "
                "data.response_key where it is a prompt, or data.plain_text where all of it is learnt"
            )
    elif "text" in row:
        if not isinstance(row["text"], str):
            raise ValueError(f"plain text is expected, found {row['text']!r:.80}; set data.prompt_key")
    elif not isinstance(row["response"], str) and not are_messages(row["response"]):
        raise ValueError(f"'response' must be text, found {row['response']!r:.80}; set data.response_key")

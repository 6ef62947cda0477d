"""Demonstrations as token batches with a loss mask.

Shape suffixes: B sequences; N all tokens of a batch end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from components.batch import Batch
from components.data.chat import as_messages, check_tools_written, render_conversation
from components.data.learnt_messages import is_learnt, refuse_prefill
from components.data.messages import TOOLS
from components.data.mixture import Note
from components.data.shown_examples import described_example
from components.data.sources import DEFAULT_ROWS, READER, data_source, is_drawn
from components.data.text import TextEncoder, render_prompt
from components.registry import load


@dataclass(frozen=True, kw_only=True)
class DemonstrationFormat:
    """Columns of a row that hold its demonstration, and how it is rendered."""

    prompt_key: str | None = None
    """Column of the prompt: text or chat messages. Without a `response_key` it holds complete conversations. None
    selects a column of conversations or of known pairs that the row has."""
    response_key: str | None = None
    """Column of the response: text or chat messages. None selects the column of a known pair, or no
    column if `prompt_key` is set."""
    apply_chat_template: bool = False
    """Render prompt and response as a user's and an assistant's message. Chat messages are always rendered with the
    chat template."""
    input_template: str | None = None
    """Text with one `{}` for the prompt, used without the chat template."""
    multiturn: bool = True
    """Learn every message of the assistant in a conversation. False learns only the last one."""
    plain_text: bool = False
    """Rows are plain texts, in `prompt_key`, `text` or `input`. Every token of them is learnt."""
    ignored_columns: tuple[str, ...] = ()
    """Columns that are ignored although their names have a well-known meaning."""

    def of(self, source: str) -> DemonstrationFormat:
        """Return the format of a source's rows. Generated rows have fixed columns."""
        if not is_drawn(source):
            return self
        return replace(self, prompt_key=None, response_key=None, plain_text=False, ignored_columns=())


@dataclass(frozen=True)
class SupervisedData:
    """Encoded demonstrations, and the number of rows that could not be used."""

    batch: Batch
    """B sequences in the order of their rows, with columns `tokens` [N]; `loss_mask` [N] bool, True on learnt tokens;
    `row` [B] int64, the number of the row."""
    kept: int
    """Number of rows in the batch, which is B."""
    dropped: dict[str, int]
    """Number of dropped rows by reason: `too_long` (above max_tokens), `nothing_to_learn` (no message of the assistant
    to learn)."""
    cut: int = 0
    """Number of truncated plain texts."""

    def describe_first(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Describe the first demonstration in one line, with marks around the learnt tokens."""
        ids = self.batch.row(0, "tokens").tolist()
        mask = self.batch.row(0, "loss_mask").tolist()
        return described_example(ids, mask, tokenizer)


@dataclass(frozen=True)
class _Example:
    """Tokens of a demonstration, and for each of them True if it is learnt."""

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
    info: Note | None = None,
) -> list[dict[str, Any]]:
    """Read or generate demonstrations as rows of `DemonstrationReader.read`.

    Args:
        source: a source of `read_records`, or a data source of a plug-in, which generates `max_rows` (10,000) rows.
        form: columns of the rows.
        split: split of a data set to read.
        max_rows: maximum number of rows. None sets no limit for rows that are read.
        seed: seed of generated rows.
        note: called with a sentence if `max_rows` leaves rows out.
        info: called with a sentence on the columns that are used and not used.

    Raises:
        ValueError: the source cannot be read, or a row has no demonstration. The message names the row.
    """
    if (generator := data_source(str(source))) is not None:
        return generator.demonstrations(max_rows or DEFAULT_ROWS, seed)
    return load(READER, "demonstrations", f"data={source}")(source, form, split, max_rows, note, info)


def encode_demonstrations(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    form: DemonstrationFormat = DemonstrationFormat(),
    *,
    max_tokens: int | None = None,
) -> SupervisedData:
    """Tokenize demonstrations and mark the learnt tokens: responses, each with one end token.

    - `{"prompt", "response"}`: the text of the prompt, the response and the end token.
    - `{"messages"}`: rendered with the chat template. In every learnt message, all tokens up to and including its first
      end token are learnt. Tokens after the last learnt token are removed.
    - `{"text"}`: all tokens are learnt, without an end token.

    Args:
        rows: rows of `load_demonstrations` or of a task.
        tokenizer: a tokenizer with an end token.
        form: rendering of prompts and responses.
        max_tokens: maximum number of tokens. Longer sequences are dropped and counted; plain texts are truncated. None
            sets no limit.

    Raises:
        ValueError: no row can be used, a row cannot be rendered, or the tokenizer has no end token.
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
        # The start of a plain text is still a valid text, but a truncated response would not end.
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
        raise ValueError(f"none of {len(rows)} demonstrations can be used (dropped: {dropped}); raise data.max_tokens")
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
    """Check that each row can be rendered, and that the model has an embedding for each of its tokens.

    Raises:
        ValueError: a row fails the check. The message names the row.
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
        # The first token is not learnt: it has no probability, because no token comes before it.
        return _Example(tokens, [index > 0 for index in range(len(tokens))])
    tools = row.get(TOOLS, ())
    before: list[dict[str, Any]] = []
    if "messages" in row:
        after = as_messages(row["messages"])
    elif form.apply_chat_template or not isinstance(row["response"], str):
        response = row["response"]
        if isinstance(response, str):
            response = [{"role": "assistant", "content": response}]
        before = as_messages(row["prompt"])
        after = as_messages(response)
        refuse_prefill(before, after)
    else:
        return _encode_pair(row, encoder, form.input_template)
    if tools:
        check_tools_written([*before, *after], tools, encoder.tokenizer)
    # Messages of the prompt are never learnt, even if the assistant wrote some of them.
    turns = [len(before) + index for index, message in enumerate(after) if message["role"] == "assistant"]
    if not form.multiturn:
        turns = turns[-1:]
    learnt = {len(before) + index for index, message in enumerate(after) if is_learnt(message)}
    return _encode_messages([*before, *after], encoder, [turn for turn in turns if turn in learnt], tools)


def _encode_pair(row: Mapping[str, Any], encoder: TextEncoder, input_template: str | None) -> _Example:
    tokenizer = encoder.tokenizer
    tools = row.get(TOOLS, ())
    if not isinstance(row["prompt"], str):
        refuse_prefill(as_messages(row["prompt"]))
        input_template = None  # messages go through the chat template, which excludes it
    if tools:
        check_tools_written(as_messages(row["prompt"]), tools, tokenizer)
    text = render_prompt(row["prompt"], tokenizer, input_template=input_template, tools=tools)
    # Prompt and response are tokenized separately, as in generation, where the ids of the prompt are fixed first.
    # Tokenized together, a token could span the border of the two.
    prompt_ids = encoder.encode_prompt(text)
    response_ids = encoder.encode(row["response"])
    # The data may have end tokens already. Exactly one is learnt.
    while response_ids and response_ids[-1] == tokenizer.eos_token_id:
        response_ids.pop()
    if not response_ids or response_ids[-1] not in encoder.end_ids:
        response_ids.append(_eos(tokenizer))
    return _Example(prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids))


def _encode_messages(
    messages: list[dict[str, Any]],
    encoder: TextEncoder,
    learnt_turns: Sequence[int],
    tools: Sequence[Mapping[str, Any]] = (),
) -> _Example:
    """Render the conversation up to each learnt message, so that the tokens of that message are known exactly.

    Raises:
        ValueError: the chat template renders earlier messages differently once a message is added.
    """
    tokenizer = encoder.tokenizer
    tokens: list[int] = []
    mask: list[bool] = []
    encoded_text = ""
    for index in learnt_turns:
        opened = ""
        if index:  # no prompt is rendered if the assistant begins; `closed` then has the definitions of tools
            opened = render_prompt(messages[:index], tokenizer, tools=tools)
        closed = render_conversation(messages[: index + 1], tokenizer, tools)
        if not (opened.startswith(encoded_text) and closed.startswith(opened)):
            raise ValueError(
                f"the chat template writes the turns before turn {index} differently once it is added "
                "(some drop earlier reasoning), so no text fits all turns; keep one assistant turn per row, or set "
                "data.multiturn=false"
            )
        # The start of a sequence may need a BOS token, which `encode_prompt` adds.
        if encoded_text:
            before = encoder.encode(opened[len(encoded_text) :])
        else:
            before = encoder.encode_prompt(opened)
        response = encoder.encode(closed[len(opened) :])
        if not opened and before == response[:1]:
            # If the assistant begins, `before` is only the BOS token, which the template writes too.
            response = response[1:]
        # The token that ends a turn may differ from the tokenizer's end token.
        learnt = next((i + 1 for i, token in enumerate(response) if token in encoder.end_ids), len(response))
        tokens += before + response
        mask += [False] * len(before) + [True] * learnt + [False] * (len(response) - learnt)
        encoded_text = closed
    if True in mask:
        end = len(mask) - mask[::-1].index(True)
        del tokens[end:], mask[end:]
        # Some templates write no token at the end of a message. Without one the policy would never stop.
        if tokens[-1] not in encoder.end_ids:
            tokens.append(_eos(tokenizer))
            mask.append(True)
    return _Example(tokens, mask)


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    assert isinstance(tokenizer.eos_token_id, int)
    return tokenizer.eos_token_id

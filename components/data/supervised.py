"""Demonstrations as token batches: which tokens are there, and which of them are learnt.

B sequences, N all tokens of a batch end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from components.batch import Batch
from components.data.records import read_records
from components.data.text import TextEncoder, as_messages, render_conversation, render_prompt


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


@dataclass(frozen=True)
class _Example:
    tokens: list[int]
    loss_mask: list[bool]


def load_demonstrations(path: str | Path) -> list[dict[str, Any]]:
    """Read rows of `{"prompt", "response"}` or `{"messages"}` from what `read_records` takes."""
    rows = read_records(path)
    for number, row in enumerate(rows):
        _check_row(row, f"{path}, row {number}")
    return rows


def encode_demonstrations(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    apply_chat_template: bool = False,
    input_template: str | None = None,
) -> SupervisedData:
    """Tokenize demonstrations and mark what is learnt: responses, each with one end token.

    A row of `{"prompt", "response"}` is the prompt's text, the response and the end token. A row of
    `{"messages"}` goes through the chat template; of every assistant turn all tokens up to and including its
    first end token are learnt, and what follows the last learnt token is left off.

    Args:
        rows: as `load_demonstrations` or a task gives them.
        tokenizer: must have an end token.
        max_tokens: longer sequences are dropped and counted, never cut; None sets no limit.
        apply_chat_template: send prompt and response through the template too, as a user's and an assistant's turn.
        input_template: text with one `{}` for the prompt of rows that do not use the chat template.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end token (eos); a policy trained without one never stops: set it")
    encoder = TextEncoder(tokenizer)
    dropped = {"too_long": 0, "nothing_to_learn": 0}
    kept: list[tuple[int, _Example]] = []
    for number, row in enumerate(rows):
        _check_row(row, f"row {number}")
        if "messages" in row:
            example = _encode_messages(as_messages(row["messages"]), encoder, f"row {number}")
        elif apply_chat_template:
            response = {"role": "assistant", "content": row["response"]}
            example = _encode_messages([*as_messages(row["prompt"]), response], encoder, f"row {number}")
        else:
            example = _encode_pair(row, encoder, input_template)
        if not any(example.loss_mask):
            dropped["nothing_to_learn"] += 1
        elif max_tokens is not None and len(example.tokens) > max_tokens:
            dropped["too_long"] += 1
        else:
            kept.append((number, example))
    if not kept:
        raise ValueError(f"none of the {len(rows)} demonstrations can be used (dropped: {dropped}); raise max_tokens")
    batch = Batch.from_rows(
        {
            "tokens": [example.tokens for _, example in kept],
            "loss_mask": [torch.tensor(example.loss_mask, dtype=torch.bool) for _, example in kept],
        },
        per_sequence={"row": torch.tensor([number for number, _ in kept], dtype=torch.int64)},
    )
    return SupervisedData(batch=batch, kept=len(kept), dropped=dropped)


def _encode_pair(row: Mapping[str, Any], encoder: TextEncoder, input_template: str | None) -> _Example:
    tokenizer = encoder.tokenizer
    templated = not isinstance(row["prompt"], str)
    text = render_prompt(row["prompt"], tokenizer, input_template=None if templated else input_template)
    # Prompt and response are tokenized apart, as at generation time the prompt's ids are fixed by then.
    prompt_ids = encoder.encode_prompt(text)
    response_ids = encoder.encode(row["response"])
    while response_ids and response_ids[-1] == tokenizer.eos_token_id:
        response_ids.pop()
    response_ids.append(_eos(tokenizer))
    return _Example(prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids))


def _encode_messages(messages: list[dict[str, Any]], encoder: TextEncoder, where: str) -> _Example:
    """Render the conversation turn by turn, so that the tokens of each turn are known exactly."""
    tokenizer = encoder.tokenizer
    eos = _eos(tokenizer)
    tokens: list[int] = []
    mask: list[bool] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = render_prompt(messages[:index], tokenizer) if index else ""
        closed = render_conversation(messages[: index + 1], tokenizer)
        if not (opened.startswith(done) and closed.startswith(opened)):
            raise ValueError(
                f"{where}: the chat template writes the turns before turn {index} differently once it is added "
                "(some drop earlier reasoning), so no text fits all turns; keep one assistant turn per row"
            )
        before = encoder.encode(opened[len(done) :]) if done else encoder.encode_prompt(opened)
        response = encoder.encode(closed[len(opened) :])
        if not opened and before == response[:1]:
            # Nothing stands before an assistant's first turn but the BOS, which the template writes as well.
            response = response[1:]
        learnt = response.index(eos) + 1 if eos in response else len(response)
        tokens += before + response
        mask += [False] * len(before) + [True] * learnt + [False] * (len(response) - learnt)
        done = closed
    if True in mask:
        end = len(mask) - mask[::-1].index(True)
        tokens, mask = tokens[:end], mask[:end]
        if tokens[-1] != eos:
            tokens, mask = [*tokens, eos], [*mask, True]
    return _Example(tokens, mask)


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    assert isinstance(tokenizer.eos_token_id, int)
    return tokenizer.eos_token_id


def _check_row(row: Mapping[str, Any], where: str) -> None:
    if "messages" in row:
        messages = row["messages"]
        good = isinstance(messages, Sequence) and all(
            isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in messages
        )
        if not good or isinstance(messages, str):
            raise ValueError(f"{where}: 'messages' must be a list of {{role, content}}, found {messages!r:.80}")
    elif not {"prompt", "response"} <= set(row):
        raise ValueError(
            f"{where}: expected the fields 'prompt' and 'response', or 'messages'; found {', '.join(map(repr, row))}"
        )
    elif not isinstance(row["response"], str):
        raise ValueError(f"{where}: 'response' must be text, found {row['response']!r:.80}")

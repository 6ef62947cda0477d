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
from components.data.cells import check_one_kind
from components.data.columns import (
    CONVERSATIONS,
    PREFERENCES,
    PROMPTS,
    RESPONSES,
    TOOLS,
    column_note,
    filled,
    is_blank,
    likely_keys,
    needs_template,
    read_prompt,
    read_system,
    read_tools,
    refuse_unread,
    refuse_weight,
    refuse_without_a_place,
    texts_of,
)
from components.data.messages import are_messages, as_messages, is_learnt, read_messages, refuse_prefill, with_system
from components.data.mixture import Note, first_rows
from components.data.records import read_records
from components.data.shown import described_example
from components.data.sources import DEFAULT_ROWS, data_source, is_drawn
from components.data.text import TextEncoder, check_tools_written, render_conversation, render_prompt

PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("problem", "solution"),
    ("input", "output"),
)
"""Columns of a prompt and its response that need no option; an `instruction` is read with its `input` or `context`."""


@dataclass(frozen=True, kw_only=True)
class DemonstrationFormat:
    """Where a row has its demonstration, and how it is written out."""

    prompt_key: str | None = None
    """Column of the prompt, text or chat messages; where there is no `response_key`, of whole conversations. None:
    that of CONVERSATIONS or PAIRS which the row has."""
    response_key: str | None = None
    """Column of the response, text or chat messages. None: that of PAIRS, or none beside a `prompt_key`."""
    apply_chat_template: bool = False
    """Take prompt and response as a user's and an assistant's turn. Chat messages always go through the template."""
    input_template: str | None = None
    """Text with one `{}` for a prompt that does not go through the chat template."""
    multiturn: bool = True
    """Learn every turn of the assistant in a conversation; otherwise only the last one."""
    plain_text: bool = False
    """Rows are texts, in `prompt_key`, `text` or `input`, of which every token is learnt."""
    ignored_columns: tuple[str, ...] = ()
    """Columns that are left out, although their names have a well-known meaning."""

    def of(self, source: str) -> DemonstrationFormat:
        """The format of a source's rows: drawn ones have it where they always do."""
        if not is_drawn(source):
            return self
        return replace(self, prompt_key=None, response_key=None, plain_text=False, ignored_columns=())

    def read(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Read a row as `{"messages"}`, `{"prompt", "response"}` or `{"text"}`, with `tools` where it has some.

        Raises:
            ValueError: a column is missing or holds something else, or one of a well-known meaning would not be read.
        """
        return self.read_columns(record)[0]

    def read_columns(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """As `read`, and the names of the columns that were read."""
        ignored = self.ignored_columns
        refuse_weight(record, ignored)
        if self.plain_text:
            return self._read_text(record)
        refuse_without_a_place(record, ignored)
        prompt_key, response_key = self._keys(record)
        system, names = read_system(record, ignored)
        tools = read_tools(record, ignored)
        row: dict[str, Any]
        if response_key is None:
            messages = _conversation(record[prompt_key], prompt_key)
            row, columns = {"messages": with_system(messages, system)}, [prompt_key]
        else:
            prompt = read_prompt(record, prompt_key, ignored)
            response = read_messages(record[response_key])
            row = {"prompt": prompt.value, "response": record[response_key] if response is None else response}
            columns = [*prompt.columns, response_key]
            _check_pair(row, prompt_key)
            self._add_system(row, system, names, tools)
        self._refuse_unread(record, [*columns, *names], row)
        return row | ({TOOLS: tools} if tools else {}), [*columns, *names, *([TOOLS] if tools else [])]

    def _keys(self, record: Mapping[str, Any]) -> tuple[str, str | None]:
        """Return the column of the prompt or the conversation, and of the response; None: there is none."""
        prompt_key, response_key = self.prompt_key, self.response_key
        if prompt_key is None and response_key is None:
            if conversations := filled(record, CONVERSATIONS, self.ignored_columns):
                return conversations[0], None
            # A column that is there and empty is an error of its own.
            pairs = [pair for pair in PAIRS if {*pair} <= {*record}.difference(self.ignored_columns)]
            if not pairs:
                raise ValueError(_missing(record))
            return pairs[0]
        if prompt_key is None:
            prompt_key = next(iter(filled(record, PROMPTS, {*self.ignored_columns, str(response_key)})), "prompt")
        for key in filter(None, (prompt_key, response_key)):
            if key not in record:
                raise ValueError(_missing(record, key))
        return prompt_key, response_key

    def _read_text(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        key = self.prompt_key or ("input" if "input" in record and "text" not in record else "text")
        if key not in record:
            raise ValueError(_missing(record, key))
        if not isinstance(record[key], str):
            raise ValueError(f"plain text is expected, found {record[key]!r:.80}; set data.prompt_key")
        return {"text": record[key]}, [key]

    def _add_system(
        self, row: dict[str, Any], system: str | None, names: list[str], tools: list[dict[str, Any]]
    ) -> None:
        """Put the system prompt into the prompt of a row, which must go through the chat template then."""
        has_text = isinstance(row["prompt"], str) and isinstance(row["response"], str)
        if has_text and not self.apply_chat_template:
            if tools:
                raise needs_template(TOOLS, tools)
            if system is not None and system.strip() not in row["prompt"]:
                raise needs_template(names[0], system)
        elif system is not None:
            row["prompt"] = with_system(as_messages(row["prompt"]), system)

    def _refuse_unread(self, record: Mapping[str, Any], columns: list[str], row: Mapping[str, Any]) -> None:
        """Refuse a row with content in columns of a known meaning that are not read and were not decided against."""
        has_pair = "response" in row
        names = ["context"]
        # Who names a column has decided between it and the others of its kind.
        if self.prompt_key is None:
            names += ["text", *CONVERSATIONS, *PROMPTS]
        if self.prompt_key is None and self.response_key is None:
            names += [*RESPONSES, *(PREFERENCES if has_pair else ())]
        others = [name for name in names if name not in columns]
        keys = f"data.prompt_key={columns[0]}" + (f" data.response_key={columns[-1]}" if has_pair else "")
        refuse_unread(record, others, texts_of(*row.values()), self.ignored_columns, f"choose columns, as {keys}")
        label = record.get("label")
        if isinstance(label, bool) and self.response_key is None and "label" not in self.ignored_columns:
            raise ValueError(
                f"column 'label' is {label}, which marks responses as wanted or not (KTO), and all would be learnt; "
                "keep the wanted rows and set data.ignored_columns=label"
            )


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

    def describe_first(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Describe the first demonstration in one line, with marks around what is learnt."""
        ids, mask = self.batch.row(0, "tokens").tolist(), self.batch.row(0, "loss_mask").tolist()
        return described_example(ids, mask, tokenizer)


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
    info: Note | None = None,
) -> list[dict[str, Any]]:
    """Read rows, as `DemonstrationFormat.read` gives them, from what `read_records` takes, or draw those of a
    plug-in's data source: 10,000, or `max_rows`. `note` is called with a sentence if `max_rows` leaves rows out, `info`
    with the columns that are used, and those that are not.

    Raises:
        ValueError: the source cannot be read, or a row has no demonstration. It names the row.
    """
    if (drawn := data_source(str(source))) is not None:
        return drawn.demonstrations(max_rows or DEFAULT_ROWS, seed)
    rows: list[dict[str, Any]] = []
    used: dict[str, None] = {}
    records = first_rows(read_records(source, split=split), max_rows, str(source), note)
    for number, record in enumerate(records):
        try:
            row, columns = form.read_columns(record)
        except ValueError as error:
            raise ValueError(f"{source}, row {number}: {error}") from error
        rows.append(row)
        used.update(dict.fromkeys(columns))
    for kind in ("prompt", "response"):
        check_one_kind((row.get(kind) for row in rows), f"{source}, its {kind}s")
    if info is not None:
        info(f"{source}: {column_note(used, records)}")
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
    tools = row.get(TOOLS, ())
    if "messages" in row:
        before, after = [], as_messages(row["messages"])
    elif form.apply_chat_template or not isinstance(row["response"], str):
        response = row["response"]
        before = as_messages(row["prompt"])
        after = [{"role": "assistant", "content": response}] if isinstance(response, str) else as_messages(response)
        refuse_prefill(before, after)
    else:
        return _encode_pair(row, encoder, form.input_template)
    if tools:
        check_tools_written([*before, *after], tools, encoder.tokenizer)
    turns = [len(before) + index for index, message in enumerate(after) if message["role"] == "assistant"]
    turns = turns if form.multiturn else turns[-1:]
    learnt = {len(before) + index for index, message in enumerate(after) if is_learnt(message)}
    return _encode_messages([*before, *after], encoder, [turn for turn in turns if turn in learnt], tools)


def _encode_pair(row: Mapping[str, Any], encoder: TextEncoder, input_template: str | None) -> _Example:
    tokenizer, tools = encoder.tokenizer, row.get(TOOLS, ())
    templated = not isinstance(row["prompt"], str)
    if templated:
        refuse_prefill(as_messages(row["prompt"]))
    if tools:
        check_tools_written(as_messages(row["prompt"]), tools, tokenizer)
    text = render_prompt(row["prompt"], tokenizer, input_template=None if templated else input_template, tools=tools)
    # Prompt and response are tokenized apart, as at generation time the prompt's ids are fixed by then.
    prompt_ids = encoder.encode_prompt(text)
    response_ids = encoder.encode(row["response"])
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
    """Render the conversation turn by turn, so that the tokens of each turn that is learnt are known exactly."""
    tokenizer = encoder.tokenizer
    tokens: list[int] = []
    mask: list[bool] = []
    done = ""
    for index in learnt_turns:
        # Definitions of tools stand before a conversation that the assistant begins.
        opened = render_prompt(messages[:index], tokenizer, tools=tools) if index else ""
        closed = render_conversation(messages[: index + 1], tokenizer, tools)
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


def _conversation(value: Any, key: str) -> list[dict[str, Any]]:
    messages = read_messages(value)
    if messages is None:
        raise ValueError(
            f"{key!r} must be a list of {{role, content}}, found {value!r:.80}; set data.response_key where it is a "
            "prompt, or data.plain_text where all of it is learnt"
        )
    return messages


def _check_pair(row: Mapping[str, Any], prompt_key: str) -> None:
    prompt, response = row["prompt"], row["response"]
    if is_blank(prompt) or not (isinstance(prompt, str) or are_messages(prompt)):
        raise ValueError(
            f"column {prompt_key!r} must hold a prompt, found {prompt!r:.80}; set data.prompt_key to another column, "
            "or data.plain_text=true for texts without a prompt"
        )
    if not isinstance(response, str) and not (response and are_messages(response)):
        raise ValueError(f"'response' must be text, found {response!r:.80}; set data.response_key")


def _missing(record: Mapping[str, Any], key: str | None = None) -> str:
    """Describe that a row has no demonstration, or lacks a column, and what to set for its file."""
    columns = sorted(map(str, record))
    known = ", ".join(f"{prompt!r} with {response!r}" for prompt, response in PAIRS)
    missing = f"there is no column {key!r}, only {columns}" if key else f"the columns {columns} are no demonstration"
    prompt, _ = likely_keys(record)
    response = next((name for name in (*RESPONSES, "chosen", "target", "label") if name in record), None)
    if prompt and response:
        remedy = f"for this file set data.prompt_key={prompt} data.response_key={response}"
    elif not is_blank(record.get("text")):
        remedy = "for this file set data.plain_text=true, which learns all of 'text'"
    else:
        remedy = "set data.prompt_key and data.response_key"
    pairs = " (rows of 'chosen' and 'rejected' are for the recipes dpo and reward_model)" if "chosen" in record else ""
    return f"{missing}; {remedy}{pairs}. Known without options are 'messages', 'conversations', and {known}"

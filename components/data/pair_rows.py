"""Rows of preference pairs: which columns hold the prompt and the two responses, and what a model reads of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from components.data.cells import kind_of, number_of
from components.data.columns import (
    CONVERSATIONS,
    PREFERENCES,
    PROMPTS,
    RESPONSES,
    TOOLS,
    column_note,
    filled,
    needs_template,
    read_prompt,
    read_system,
    read_tools,
    refuse_unread,
    refuse_weight,
    refuse_without_a_place,
    texts_of,
)
from components.data.messages import (
    ASSISTANT,
    are_messages,
    as_messages,
    is_learnt,
    read_messages,
    refuse_prefill,
    with_system,
)
from components.data.model_tokens import turn_end_id
from components.data.sources import is_drawn
from components.data.text import check_tools_written, render_conversation, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
ANSWER_MARK = "\n\nAssistant:"
"""Before each response of dialogues that are one string, as in hh-rlhf."""


@dataclass(frozen=True, kw_only=True)
class PairFormat:
    """Where a row has its pair."""

    prompt_key: str | None = None
    """Column of what both responses follow: text, or chat messages. None: that of PROMPTS which the row has, or else
    what the responses begin with alike."""
    chosen_key: str = "chosen"
    """Column of the better response."""
    rejected_key: str = "rejected"
    """Column of the other."""
    apply_chat_template: bool = False
    """Take prompt and response as a user's and an assistant's message. Chat messages always go through the template."""
    input_template: str | None = None
    """Text with one `{}` for a prompt that does not go through the chat template."""
    with_margin: bool = False
    """Read the column `margin`, a number; otherwise margins are 0."""
    ignored_columns: tuple[str, ...] = ()
    """Columns that are left out, although their names have a well-known meaning."""

    def of(self, source: str) -> PairFormat:
        """The format of a source's rows: drawn ones have it where they always do."""
        if not is_drawn(source):
            return self
        return PairFormat(
            prompt_key="prompt", apply_chat_template=self.apply_chat_template, with_margin=self.with_margin
        )

    def prompt_column(self, row: Mapping[str, Any]) -> str | None:
        """Return the column with the prompt of a row; None where there is none."""
        if self.prompt_key is not None:
            return self.prompt_key
        others = {self.chosen_key, self.rejected_key, *self.ignored_columns}
        conversations = [(name, read_messages(row[name])) for name in filled(row, CONVERSATIONS, others)]
        # One that ends with a response is the chosen one again.
        open_ended = [name for name, messages in conversations if messages and messages[-1]["role"] != ASSISTANT]
        return next(iter([*filled(row, PROMPTS, others), *open_ended]), None)

    def columns_of(self, row: Mapping[str, Any]) -> list[str]:
        """Return the columns of a row that are read."""
        key = self.prompt_column(row)
        prompt = () if key is None or key not in row else read_prompt(row, key, self.ignored_columns).columns
        system = read_system(row, self.ignored_columns)[1]
        others = [TOOLS] * bool(filled(row, [TOOLS], self.ignored_columns)) + ["margin"] * self.with_margin
        return [*system, *prompt, self.chosen_key, self.rejected_key, *others]

    def describe_columns(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Describe in one line which columns of rows are used, and which are not."""
        return column_note((name for row in rows for name in self.columns_of(row)), rows)


@dataclass(frozen=True)
class Pair:
    """Two responses to the same, as a model reads them, without end token."""

    prompt: str
    chosen: str
    """What follows the prompt."""
    rejected: str
    margin: float
    """By how much the one is better; 0 where nobody says."""
    opening: str
    """What the conversation begins with, by which pairs are told apart when some are held out."""


def read_pair(row: Mapping[str, Any], form: PairFormat, tokenizer: PreTrainedTokenizerBase) -> Pair:
    """Write out the pair of a row as text; `preferences.read_pairs` describes the rows.

    Raises:
        ValueError: a column is missing or holds something else, or one of a well-known meaning would not be read.
    """
    ignored = form.ignored_columns
    prompt, chosen, rejected, margin = check_columns(row, form)
    key = form.prompt_column(row)
    system, names = read_system(row, ignored)
    tools = read_tools(row, ignored)
    if isinstance(chosen, list) and isinstance(rejected, list):
        before, chosen, rejected = _split(prompt, chosen, rejected, system, key)
        return _from_messages([*before, *chosen], [*before, *rejected], len(before), margin, tokenizer, tools)
    if isinstance(chosen, list) or isinstance(rejected, list):
        raise ValueError(
            f"{form.chosen_key!r} is {kind_of(chosen)} and {form.rejected_key!r} {kind_of(rejected)}; give strings in "
            "both, or lists of chat messages in both"
        )
    if form.apply_chat_template or isinstance(prompt, list):
        if prompt is None:
            raise ValueError(
                "data.apply_chat_template needs the role of each message; set data.prompt_key, or give lists of chat "
                "messages"
            )
        before = with_system(as_messages(prompt), system)
        refuse_prefill(before)
        better, worse = ([*before, {"role": ASSISTANT, "content": response}] for response in (chosen, rejected))
        return _from_messages(better, worse, len(before), margin, tokenizer, tools)
    if tools:
        raise needs_template(TOOLS, tools)
    if system is not None and not _begin_with(system, prompt, chosen, rejected):
        raise needs_template(names[0], system)
    return _from_text(prompt, chosen, rejected, form, margin, tokenizer)


def check_columns(row: Mapping[str, Any], form: PairFormat) -> tuple[Any, Any, Any, float]:
    """Read the prompt (None without a column of it), the two responses and the margin of a row; no tokenizer is needed.

    Raises:
        ValueError: a column is missing or holds something else, or one of a well-known meaning would not be read.
    """
    ignored = form.ignored_columns
    refuse_weight(row, ignored)
    refuse_without_a_place(row, ignored)
    chosen = _column(row, form.chosen_key, row.get(form.chosen_key), "chosen_key")
    rejected = _column(row, form.rejected_key, row.get(form.rejected_key), "rejected_key")
    key = form.prompt_column(row)
    prompt = None
    if key is not None:
        prompt = _column(row, key, read_prompt(row, key, ignored).value if key in row else None, "prompt_key")
    _refuse_unread(row, form, prompt, chosen, rejected)
    return prompt, chosen, rejected, _margin(row, form)


def _margin(row: Mapping[str, Any], form: PairFormat) -> float:
    if not form.with_margin:
        return 0.0
    try:
        return number_of(row.get("margin"), "its column 'margin'")
    except ValueError as error:
        raise ValueError(f"{error}, or leave algorithm.margin_loss out") from error


def _from_text(
    prompt: str | None, chosen: str, rejected: str, form: PairFormat, margin: float, tokenizer: PreTrainedTokenizerBase
) -> Pair:
    if prompt is None:
        if form.input_template is not None:
            raise ValueError(
                f"data.input_template={form.input_template!r} goes around a prompt of its own column, and the row has "
                "none; set data.prompt_key, or leave it out"
            )
        prompt = _common_start(chosen, rejected)
        return _pair(prompt, chosen[len(prompt) :], rejected[len(prompt) :], margin, tokenizer)
    text = render_prompt(prompt, tokenizer, input_template=form.input_template)
    return _pair(text, chosen, rejected, margin, tokenizer, opening=prompt.partition(ANSWER_MARK)[0])


def _begin_with(text: str, prompt: str | None, *responses: str) -> bool:
    """Return True where a text is in the prompt, or in all responses, if these hold the prompt."""
    return all(text.strip() in whole for whole in ([prompt] if prompt is not None else responses))


def _split(
    prompt: Any, chosen: Messages, rejected: Messages, system: str | None, key: str | None
) -> tuple[Messages, Messages, Messages]:
    """Split pairs of conversations: the prompt, as far as its column has it, and what is left of both.

    Conversations may repeat the prompt of the column, with or without its system prompt. Text is repeated where it is
    a message of the user's before the responses part.

    Raises:
        ValueError: they begin with neither the prompt nor a response to it.
    """
    if isinstance(prompt, str) and prompt.strip() in _common_requests(chosen, rejected):
        prompt = None
    if prompt is None:
        return [], with_system(chosen, system), with_system(rejected, system)
    first, before = _without_system(as_messages(prompt))
    systems = [first, *(_without_system(part)[0] for part in (chosen, rejected))]
    texts = {str(message["content"]).strip() for message in systems if message is not None}
    if len(texts) > 1:
        raise ValueError(
            f"the prompt and its responses have different system prompts, {sorted(texts)!r:.200}; keep one"
        )
    head = next((message for message in systems if message is not None), None)
    parts = [_without_system(part)[1] for part in (chosen, rejected)]
    if before and all(_are_alike(part[: len(before)], before) for part in parts):
        parts = [part[len(before) :] for part in parts]
    if not all(_follows(part, before) for part in parts):
        raise ValueError(
            f"the responses do not repeat the prompt of column {key!r} ({prompt!r:.80}), and do not begin with a "
            "message that may follow it; give the assistant's messages alone, or whole conversations and "
            f"data.ignored_columns={key}"
        )
    return with_system([*([head] if head else []), *before], system), parts[0], parts[1]


def _are_alike(some: Messages, others: Messages) -> bool:
    """Return True where messages say the same, whatever else they hold."""
    first, second = (
        [(message["role"], str(message["content"]).strip(), message.get("tool_calls")) for message in messages]
        for messages in (some, others)
    )
    return first == second


def _follows(response: Messages, before: Messages) -> bool:
    """Return True where messages may be a response to those before."""
    if not response:
        return False
    role, last = response[0]["role"], before[-1]["role"] if before else None
    return last != ASSISTANT if role == ASSISTANT else role in ("user", "tool") and last in (None, ASSISTANT)


def _common_requests(chosen: Messages, rejected: Messages) -> list[str]:
    """Return the texts of the user's messages that both conversations begin with."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected))
    return [str(message["content"]).strip() for message, _ in alike if message["role"] == "user"]


def _without_system(messages: Messages) -> tuple[dict[str, Any] | None, Messages]:
    """Split the system's message off that messages begin with, if they do."""
    return (messages[0], messages[1:]) if messages and messages[0]["role"] == "system" else (None, messages)


def _refuse_unread(
    row: Mapping[str, Any], form: PairFormat, prompt: Any, chosen: str | Messages, rejected: str | Messages
) -> None:
    """Refuse a row with content in columns of a known meaning that are not read and were not decided against."""
    columns = form.columns_of(row)
    names = ["context", *(() if form.prompt_key is not None else (*PROMPTS, *CONVERSATIONS))]
    read = texts_of(*([] if prompt is None else [prompt]), chosen, rejected)
    remedy = "set data.prompt_key to the column with the prompt"
    refuse_unread(row, [name for name in names if name not in columns], read, form.ignored_columns, remedy)


def _column(row: Mapping[str, Any], name: str, value: Any, option: str) -> Any:
    """Return the text or the messages of a column, `value`; ValueError where it holds something else."""
    messages = read_messages([value] if isinstance(value, Mapping) else value)
    value = value if messages is None else messages
    if isinstance(value, str) or (value and are_messages(value)):
        return value
    found = f"found {kind_of(row.get(name))}"
    if row.get(name) is None:
        found = f"but it is null or absent; there are the columns {sorted(map(str, row))}"
    remedy = "" if option == "prompt_key" else _remedy(row)
    raise ValueError(f"column {name!r} must hold text or a list of chat messages, {found}; set data.{option}{remedy}")


def _remedy(row: Mapping[str, Any]) -> str:
    """Return what to set for the file of a row, if it has pairs in other columns, or what it has in their place."""
    texts = [str(name) for name, value in row.items() if isinstance(value, str | list)]
    chosen, rejected = (next((name for name in texts if kind in name), None) for kind in PREFERENCES)
    if chosen and rejected:
        return f"; for this file data.chosen_key={chosen} data.rejected_key={rejected}"
    if filled(row, (*CONVERSATIONS, *RESPONSES)):
        return " (a row with one response is a demonstration, for the recipe sft)"
    return ""


def _common_start(chosen: str, rejected: str) -> str:
    common = os.path.commonprefix([chosen, rejected])  # noqa: RUF071 - of texts, character by character
    mark = common.rfind(ANSWER_MARK)
    return common[: mark + len(ANSWER_MARK)] if mark >= 0 else common[: max(common.rfind(" "), common.rfind("\n"), 0)]


def _from_messages(
    chosen: list[dict[str, Any]],
    rejected: list[dict[str, Any]],
    given: int,
    margin: float,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
) -> Pair:
    """`given` messages are known to be the prompt; so are those that follow and are alike, but for the last of each."""
    limit = min(len(chosen), len(rejected)) - 1
    count = given
    while count < limit and chosen[count] == rejected[count]:
        count += 1
    while count > given and chosen[count - 1].get("role") == "assistant":
        count -= 1  # what follows it is no response
    if not all(is_learnt(message) for message in (*chosen[count:], *rejected[count:]) if message["role"] == ASSISTANT):
        raise ValueError(
            "a message of a response has 'weight': 0 or 'train': false, and of a pair all messages after the prompt "
            "count; remove it"
        )
    if tools:
        check_tools_written(chosen, tools, tokenizer)
    prompt = render_prompt(chosen[:count], tokenizer, tools=tools) if count else ""
    texts = [render_conversation(messages, tokenizer, tools) for messages in (chosen, rejected)]
    if not all(text.startswith(prompt) for text in texts):
        raise ValueError(
            "the chat template writes the prompt differently once there is a response (some drop earlier reasoning), "
            "so the model would not be scored on what it reads; mend the template, or write the responses out as "
            "strings"
        )
    # Not the first message: a system's may be the same everywhere.
    opening = next((str(message.get("content")) for message in chosen[:count] if message.get("role") == "user"), "")
    better, worse = (text[len(prompt) :] for text in texts)
    return _pair(prompt, better, worse, margin, tokenizer, opening=opening)


def _pair(
    prompt: str, chosen: str, rejected: str, margin: float, tokenizer: PreTrainedTokenizerBase, opening: str = ""
) -> Pair:
    opening = opening or prompt.partition(ANSWER_MARK)[0] or prompt.strip() or chosen
    better, worse = (without_end(response, tokenizer) for response in (chosen, rejected))
    return Pair(prompt, better, worse, float(margin), opening)


def without_end(response: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a response without the tokenizer's end token; one that ends a turn by another token keeps that, as its
    last token.
    """
    end, turn_end = str(tokenizer.eos_token), turn_end_id(tokenizer)
    while (cut := response.rstrip()).endswith(end):
        response = cut.removesuffix(end)
    is_ended = turn_end is not None and cut.endswith(str(tokenizer.convert_ids_to_tokens(turn_end)))
    return cut if is_ended else response

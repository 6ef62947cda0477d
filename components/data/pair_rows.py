"""Rows of preference pairs: selection of columns, and conversion to the texts that a model reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from components.data.cells import number_of
from components.data.chat import as_messages, check_tools_written, render_conversation, with_system
from components.data.columns import (
    CONVERSATIONS,
    PREFERENCES,
    PROMPTS,
    RESPONSES,
    column_note,
    filled,
    read_prompt,
    read_system,
    read_tools,
    refuse_unread,
    refuse_weight,
    refuse_without_a_place,
    texts_of,
)
from components.data.conversations import read_messages
from components.data.learnt_messages import is_learnt, refuse_prefill
from components.data.messages import ASSISTANT, TOOLS, are_messages, needs_template
from components.data.model_tokens import turn_end_id
from components.data.sources import is_drawn
from components.data.text import render_prompt
from components.data.values import kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
ANSWER_MARK = "\n\nAssistant:"
"""Text before each response in dialogues that are a single string, as in hh-rlhf."""


@dataclass(frozen=True, kw_only=True)
class PairFormat:
    """Columns of a row that hold its pair, and how they are rendered."""

    prompt_key: str | None = None
    """Column of the prompt: text, or chat messages. None selects the first column of PROMPTS that the row has, or the
    common start of the two responses if it has none."""
    chosen_key: str = "chosen"
    """Column of the better response."""
    rejected_key: str = "rejected"
    """Column of the worse response."""
    apply_chat_template: bool = False
    """Render prompt and response as a user's and an assistant's message. Chat messages are always rendered with the
    chat template."""
    input_template: str | None = None
    """Text with one `{}` for the prompt, used without the chat template."""
    with_margin: bool = False
    """Read the margin from the column `margin`. False sets all margins to 0."""
    ignored_columns: tuple[str, ...] = ()
    """Columns that are ignored although their names have a well-known meaning."""

    def of(self, source: str) -> PairFormat:
        """Return the format of a source's rows. Generated rows have fixed columns."""
        if not is_drawn(source):
            return self
        generated = PairFormat(prompt_key="prompt")
        fixed = {name: getattr(generated, name) for name in ("prompt_key", "chosen_key", "rejected_key")}
        return replace(self, **fixed, input_template=None, ignored_columns=())

    def of_row(self, row: Mapping[str, Any]) -> tuple[PairFormat, bool | None]:  # noqa: ARG002 - for subclasses
        """Return the format of one row, and its label: None for a pair. A subclass may read rows of several kinds."""
        return self, None

    def prompt_column(self, row: Mapping[str, Any]) -> str | None:
        """Return the column with the prompt of a row, or None if there is none."""
        if self.prompt_key is not None:
            return self.prompt_key
        others = {self.chosen_key, self.rejected_key, *self.ignored_columns}
        conversations = [(name, read_messages(row[name])) for name in filled(row, CONVERSATIONS, others)]
        # A conversation that ends with a response repeats the chosen response, so it is not a prompt.
        open_ended = [name for name, messages in conversations if messages and messages[-1]["role"] != ASSISTANT]
        return next(iter([*filled(row, PROMPTS, others), *open_ended]), None)

    def columns_of(self, row: Mapping[str, Any]) -> list[str]:
        """Return the columns of a row that are read."""
        key = self.prompt_column(row)
        _, columns = read_system(row, self.ignored_columns)
        if key is not None and key in row:
            columns = [*columns, *read_prompt(row, key, self.ignored_columns).columns]
        columns = [*columns, self.chosen_key, self.rejected_key, *filled(row, [TOOLS], self.ignored_columns)]
        if self.with_margin:
            columns.append("margin")
        return columns

    def describe_columns(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Describe in one line which columns of rows are used, and which are not."""
        return column_note((name for row in rows for name in self.columns_of(row)), rows)


@dataclass(frozen=True)
class Pair:
    """Two responses to the same prompt, as the texts that a model reads, without end token."""

    prompt: str
    """Text of the prompt, the common start of both sequences."""
    chosen: str
    """Text of the better response, which follows the prompt."""
    rejected: str
    """Text of the worse response, which follows the prompt."""
    margin: float
    """Difference in quality between the two; 0 without a margin."""
    opening: str
    """Start of the conversation. Pairs with the same opening are held out together."""
    label: bool | None = None
    """Label of a row with a single response, which is then both `chosen` and `rejected`. None for a pair."""


def read_pair(row: Mapping[str, Any], form: PairFormat, tokenizer: PreTrainedTokenizerBase) -> Pair:
    """Render the pair of a row as text. `preferences.read_pairs` describes the rows.

    Raises:
        ValueError: a column is missing or has a value of the wrong kind, or a column with a well-known meaning would
            not be read.
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
        chosen = [*before, {"role": ASSISTANT, "content": chosen}]
        rejected = [*before, {"role": ASSISTANT, "content": rejected}]
        return _from_messages(chosen, rejected, len(before), margin, tokenizer, tools)
    # From here the pair is plain text, in which tools and a separate system prompt have no place.
    if tools:
        raise needs_template(TOOLS, tools)
    if system is not None and not _begin_with(system, prompt, chosen, rejected):
        raise needs_template(names[0], system)
    return _from_text(prompt, chosen, rejected, form, margin, tokenizer)


def check_columns(row: Mapping[str, Any], form: PairFormat) -> tuple[Any, Any, Any, float]:
    """Read the prompt (None if no column holds it), the two responses and the margin of a row, without a tokenizer.

    Raises:
        ValueError: a column is missing or has a value of the wrong kind, or a column with a well-known meaning would
            not be read.
    """
    ignored = form.ignored_columns
    refuse_weight(row, ignored)
    refuse_without_a_place(row, ignored)
    chosen = _column(row, form.chosen_key, row.get(form.chosen_key), "chosen_key")
    rejected = _column(row, form.rejected_key, row.get(form.rejected_key), "rejected_key")
    key = form.prompt_column(row)
    prompt = None
    if key is not None:
        if key in row:
            prompt = read_prompt(row, key, ignored).value
        prompt = _column(row, key, prompt, "prompt_key")
    _refuse_unread(row, form, prompt, chosen, rejected)
    return prompt, chosen, rejected, _margin(row, form)


def _margin(row: Mapping[str, Any], form: PairFormat) -> float:
    if not form.with_margin:
        return 0.0
    try:
        return number_of(row.get("margin"), "its column 'margin'")
    except ValueError as error:
        raise ValueError(f"{error}, or do not set algorithm.margin_loss") from error


def _from_text(
    prompt: str | None, chosen: str, rejected: str, form: PairFormat, margin: float, tokenizer: PreTrainedTokenizerBase
) -> Pair:
    if prompt is None:
        if form.input_template is not None:
            raise ValueError(
                f"data.input_template={form.input_template!r} needs a column with the prompt, and the row has none; "
                "set data.prompt_key, or do not set data.input_template"
            )
        prompt = _common_start(chosen, rejected)
        return _pair(prompt, chosen[len(prompt) :], rejected[len(prompt) :], margin, tokenizer)
    text = render_prompt(prompt, tokenizer, input_template=form.input_template)
    return _pair(text, chosen, rejected, margin, tokenizer, opening=prompt.partition(ANSWER_MARK)[0])


def _begin_with(text: str, prompt: str | None, *responses: str) -> bool:
    """Return True if a text is in the prompt. Without a prompt: if it is in all responses, which then contain it."""
    if prompt is not None:
        return text.strip() in prompt
    return all(text.strip() in response for response in responses)


def _split(
    prompt: Any, chosen: Messages, rejected: Messages, system: str | None, key: str | None
) -> tuple[Messages, Messages, Messages]:
    """Split a pair of conversations into the messages of the prompt column and the rest of both conversations.

    Conversations may repeat the prompt of the column, with or without its system prompt. If the prompt is text and the
    conversations have it as a user's message in their common start, the prompt column adds nothing: the first result is
    empty.

    Raises:
        ValueError: the conversations begin neither with the prompt nor with a response to it.
    """
    # UltraFeedback has the prompt as text, and again as the first message of both conversations.
    if isinstance(prompt, str) and prompt.strip() in _common_requests(chosen, rejected):
        prompt = None
    if prompt is None:
        return [], with_system(chosen, system), with_system(rejected, system)
    prompt_system, before = _without_system(as_messages(prompt))
    chosen_system, chosen = _without_system(chosen)
    rejected_system, rejected = _without_system(rejected)
    # Any of the three may have the system prompt, but they must agree.
    systems = [message for message in (prompt_system, chosen_system, rejected_system) if message is not None]
    texts = {str(message["content"]).strip() for message in systems}
    if len(texts) > 1:
        raise ValueError(
            f"the prompt and its responses have different system prompts, {sorted(texts)!r:.200}; keep one"
        )
    if before and all(_are_alike(part[: len(before)], before) for part in (chosen, rejected)):
        chosen = chosen[len(before) :]
        rejected = rejected[len(before) :]
    if not _follows(chosen, before) or not _follows(rejected, before):
        raise ValueError(
            f"the responses do not repeat the prompt of column {key!r} ({prompt!r:.80}), and do not begin with a "
            "message that may follow it; give the assistant's messages alone, or whole conversations and "
            f"data.ignored_columns={key}"
        )
    return with_system([*systems[:1], *before], system), chosen, rejected


def _are_alike(messages: Messages, others: Messages) -> bool:
    """Return True if two lists of messages have the same roles, stripped contents and tool calls."""
    return [_content(message) for message in messages] == [_content(message) for message in others]


def _content(message: Mapping[str, Any]) -> tuple[Any, ...]:
    return message["role"], str(message["content"]).strip(), message.get("tool_calls")


def _follows(response: Messages, before: Messages) -> bool:
    """Return True if messages may be a response to the messages before."""
    if not response:
        return False
    last_role = None
    if before:
        last_role = before[-1]["role"]
    if response[0]["role"] == ASSISTANT:
        return last_role != ASSISTANT
    return response[0]["role"] in ("user", "tool") and last_role in (None, ASSISTANT)


def _common_requests(chosen: Messages, rejected: Messages) -> list[str]:
    """Return the texts of the user's messages in the common start of both conversations."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected))
    return [str(message["content"]).strip() for message, _ in alike if message["role"] == "user"]


def _without_system(messages: Messages) -> tuple[dict[str, Any] | None, Messages]:
    """Split off the leading system message. It is None if there is none."""
    if messages and messages[0]["role"] == "system":
        return messages[0], messages[1:]
    return None, messages


def _refuse_unread(
    row: Mapping[str, Any], form: PairFormat, prompt: Any, chosen: str | Messages, rejected: str | Messages
) -> None:
    """Reject a row with content in a column of a well-known meaning that is neither read nor ignored by the user."""
    columns = form.columns_of(row)
    names = ["context"]
    if form.prompt_key is None:  # with a prompt_key the user has decided against the other columns
        names += [*PROMPTS, *CONVERSATIONS]
    texts = texts_of(chosen, rejected)
    if prompt is not None:
        texts += texts_of(prompt)
    remedy = "set data.prompt_key to the column with the prompt"
    refuse_unread(row, [name for name in names if name not in columns], texts, form.ignored_columns, remedy)


def _column(row: Mapping[str, Any], name: str, value: Any, option: str) -> Any:
    """Return the text or the messages in `value`, the content of a column.

    Raises:
        ValueError: the content is something else.
    """
    # A single message is a list of one.
    candidates = value
    if isinstance(value, Mapping):
        candidates = [value]
    messages = read_messages(candidates)
    if messages is not None:
        value = messages
    if isinstance(value, str) or (value and are_messages(value)):
        return value
    content = f"found {kind_of(row.get(name))}"
    if row.get(name) is None:
        content = f"but it is null or absent; there are the columns {sorted(map(str, row))}"
    remedy = ""
    if option != "prompt_key":
        remedy = _remedy(row)
    raise ValueError(f"column {name!r} must hold text or a list of chat messages, {content}; set data.{option}{remedy}")


def _remedy(row: Mapping[str, Any]) -> str:
    """Return the options for a row with pairs in other columns, or a hint for a row with demonstrations."""
    # Only columns that could hold a response, not scores such as `chosen_rating`.
    texts = [str(name) for name, value in row.items() if isinstance(value, str | list)]
    chosen, rejected = (next((name for name in texts if kind in name), None) for kind in PREFERENCES)
    if chosen and rejected:
        return f"; for this file data.chosen_key={chosen} data.rejected_key={rejected}"
    if filled(row, (*CONVERSATIONS, *RESPONSES)):
        return " (a row with one response is a demonstration, for the recipe sft)"
    return ""


def _common_start(chosen: str, rejected: str) -> str:
    """Return the common start of two texts, up to the last ANSWER_MARK, or else up to the last blank or newline."""
    common = os.path.commonprefix([chosen, rejected])  # noqa: RUF071 - of texts, character by character
    mark = common.rfind(ANSWER_MARK)
    if mark >= 0:
        return common[: mark + len(ANSWER_MARK)]
    # The prompt must not end inside of a word that both responses begin with.
    return common[: max(common.rfind(" "), common.rfind("\n"), 0)]


def _from_messages(
    chosen: list[dict[str, Any]],
    rejected: list[dict[str, Any]],
    prompt_length: int,
    margin: float,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
) -> Pair:
    """Render a pair of conversations.

    The first `prompt_length` messages are the prompt. The prompt continues with the following messages that are equal
    in both, except for the last message of each conversation.
    """
    limit = min(len(chosen), len(rejected)) - 1
    count = prompt_length
    while count < limit and chosen[count] == rejected[count]:
        count += 1
    while count > prompt_length and chosen[count - 1].get("role") == "assistant":
        count -= 1  # a prompt must not end with the assistant's message: what follows would not be a response
    if not all(is_learnt(message) for message in (*chosen[count:], *rejected[count:]) if message["role"] == ASSISTANT):
        raise ValueError(
            "a message of a response has 'weight': 0 or 'train': false, and of a pair all messages after the prompt "
            "count; remove it"
        )
    if tools:
        check_tools_written(chosen, tools, tokenizer)
    prompt = ""
    if count:
        prompt = render_prompt(chosen[:count], tokenizer, tools=tools)
    # The complete conversation is rendered, because the end of a message depends on the template.
    texts = [render_conversation(messages, tokenizer, tools) for messages in (chosen, rejected)]
    if not all(text.startswith(prompt) for text in texts):
        raise ValueError(
            "the chat template writes the prompt differently once there is a response (some drop earlier reasoning), "
            "so the model would not be scored on what it reads; correct the template, or give the responses as strings"
        )
    # The first user's message instead of the first message: all conversations may begin with the same system message.
    opening = next((str(message.get("content")) for message in chosen[:count] if message.get("role") == "user"), "")
    chosen_text, rejected_text = (text[len(prompt) :] for text in texts)
    return _pair(prompt, chosen_text, rejected_text, margin, tokenizer, opening=opening)


def _pair(
    prompt: str, chosen: str, rejected: str, margin: float, tokenizer: PreTrainedTokenizerBase, opening: str = ""
) -> Pair:
    opening = opening or prompt.partition(ANSWER_MARK)[0] or prompt.strip() or chosen
    return Pair(prompt, without_end(chosen, tokenizer), without_end(rejected, tokenizer), float(margin), opening)


def without_end(response: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Remove the end token from the end of a response.

    A token that ends a turn is kept as the last token, if the chat template uses another one than the end token. White
    space after it is removed.
    """
    # Data sets contain end tokens, sometimes twice. Encoding adds exactly one.
    end = str(tokenizer.eos_token)
    while (stripped := response.rstrip()).endswith(end):
        response = stripped.removesuffix(end)
    turn_end = turn_end_id(tokenizer)
    if turn_end is not None and stripped.endswith(str(tokenizer.convert_ids_to_tokens(turn_end))):
        return stripped
    return response

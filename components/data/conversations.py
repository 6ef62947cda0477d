"""Conversion of the conversations of data sets to the messages of chat templates, and of their definitions of tools.

Supported are OpenAI's messages and ShareGPT's turns, `{from, value}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.data.cells import text_message
from components.data.chat import as_messages, parsed
from components.data.messages import ASSISTANT

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "system": "system",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool": "tool",
}
"""Speaker of a ShareGPT turn (`from`) -> role of the chat message."""
CALLS = ("function_call", "tool_call")
"""Speakers of ShareGPT turns whose value is the JSON text of a tool call or of a list of tool calls."""


def read_messages(value: object) -> list[dict[str, Any]] | None:
    """Read a conversation of a data set. Return None if the value is not a conversation.

    Raises:
        ValueError: a turn has an unknown role, a content that is not text, or a tool call that cannot be parsed.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return None
    if not all(isinstance(turn, Mapping) and ("role" in turn or _is_sharegpt(turn)) for turn in value):
        return None
    # One conversation may mix both forms, so each turn is converted by itself.
    messages = list(value)
    for number, turn in enumerate(messages):
        if _is_sharegpt(turn):
            messages[number] = _from_sharegpt(turn)
    return as_messages([text_message(message, f"message {number}") for number, message in enumerate(messages)])


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """Parse definitions of tools: a list of JSON schemas, or JSON text of the list or of its items.

    Raises:
        ValueError: the value is something else.
    """
    tools = parsed(value, "column 'tools'")
    if isinstance(tools, Mapping):
        tools = [tools]
    if isinstance(tools, Sequence) and not isinstance(tools, str):
        tools = [parsed(tool, "column 'tools'") for tool in tools]
        if all(isinstance(tool, Mapping) for tool in tools):
            return [dict(tool) for tool in tools]
    raise ValueError(f"column 'tools' must be a list of JSON schemas, or JSON text of it, found {value!r:.80}")


def _is_sharegpt(turn: Mapping[str, Any]) -> bool:
    return {"from", "value"} <= set(turn)


def _from_sharegpt(turn: Mapping[str, Any]) -> dict[str, Any]:
    speaker = turn["from"]
    if speaker not in SHAREGPT_ROLES:
        raise ValueError(
            f"a turn is 'from': {speaker!r}, which is none of {', '.join(SHAREGPT_ROLES)}; write the conversation as "
            "messages of role and content"
        )
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if speaker not in CALLS:
        return {"role": SHAREGPT_ROLES[speaker], "content": turn["value"], **others}
    calls = parsed(turn["value"], "the value of a turn of 'function_call'")
    if not isinstance(calls, list):
        calls = [calls]
    return {"role": ASSISTANT, "content": "", "tool_calls": calls, **others}

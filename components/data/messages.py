"""Conversion of the chat messages of data sets to the form of chat templates: `{role, content, tool_calls}`.

Supported are OpenAI's messages and ShareGPT's turns, `{from, value}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from components.data.cells import text_message

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
"""Speakers of ShareGPT turns whose value is the JSON text of a call or of a list of calls."""
ASSISTANT = "assistant"
"""Role of messages that the model learns."""


def are_messages(value: object) -> bool:
    """Return True for a list of chat messages, each with `role` and `content`."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in value)


def as_messages(prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Wrap a string as one user message. In chat messages, parse the arguments of tool calls.

    Raises:
        ValueError: a tool call cannot be parsed.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [_with_parsed_calls(message) for message in prompt]


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


def with_system(messages: Sequence[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Put a system prompt before messages, unless they begin with it already.

    Raises:
        ValueError: they begin with a different system prompt.
    """
    if system is None:
        return list(messages)
    if messages and messages[0]["role"] == "system":
        # Two different system prompts would leave it to the template which one the model reads.
        if str(messages[0]["content"]).strip() != system.strip():
            raise ValueError(
                f"the system prompt {system!r:.80} of its column differs from {messages[0]['content']!r:.80}, with "
                "which the messages begin; keep one of them, or name the column in data.ignored_columns"
            )
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def refuse_prefill(messages: Sequence[Mapping[str, Any]], response: Sequence[Mapping[str, Any]] = ()) -> None:
    """Reject a prompt that ends with a message of the assistant and is followed by the response.

    Args:
        messages: the prompt.
        response: response as messages. Empty if the response is text, which is an assistant's message.

    Raises:
        ValueError: two messages of the assistant would follow each other.
    """
    if messages and messages[-1]["role"] == ASSISTANT and not (response and response[0]["role"] != ASSISTANT):
        raise ValueError(
            f"the prompt ends with a message of the assistant ({messages[-1]['content']!r:.80}), so that the response "
            "would be a second one; move its text into the response"
        )


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Return True for an assistant's message that is not excluded by `weight: 0` (OpenAI) or `train: false` (axolotl).

    Raises:
        ValueError: a weight is neither 0 nor 1, or marks a message of another role as learnt.
    """
    marks = {name: message[name] for name in ("weight", "train") if message.get(name) is not None}
    for name, mark in marks.items():
        if not isinstance(mark, int | float) or mark not in (0, 1):
            raise ValueError(f"a message of {message['role']!r} has {name!r}: {mark!r}; give 1 (learnt) or 0 (not)")
        if mark and message["role"] != ASSISTANT:
            raise ValueError(
                f"a message of {message['role']!r} has {name!r}: {mark!r}, and only the assistant's messages are "
                "learnt; remove it, or set it to 0"
            )
    # axolotl's marks of parts of a message would need character offsets after the template is applied.
    if message.get("train_detail"):
        raise ValueError("a message has 'train_detail', which marks parts of it; set 'weight' for the whole message")
    return message["role"] == ASSISTANT and all(marks.values())


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
    calls = _parsed(turn["value"], "the value of a turn of 'function_call'")
    if not isinstance(calls, list):
        calls = [calls]
    return {"role": ASSISTANT, "content": "", "tool_calls": calls, **others}


def _with_parsed_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message with its tool calls parsed.

    OpenAI's form has the arguments as JSON text, which a chat template would encode a second time.
    """
    copy = dict(message)
    calls = copy.get("tool_calls")
    if calls is None and isinstance(copy.get("function_call"), Mapping):
        calls = [copy.pop("function_call")]  # OpenAI's form before there were several calls
        copy["tool_calls"] = calls
    if not calls:
        return copy
    calls = _parsed(calls, "'tool_calls'")
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"'tool_calls' must be a list of calls, found {calls!r:.80}")
    copy["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return copy


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    # OpenAI nests the call under `function`; other data sets have it at the top level.
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_parsed_arguments(call["function"])}
    name = call.get("name")
    if not isinstance(name, str):
        raise ValueError(f"a tool call has no name: {dict(call)!r:.80}; give {{name, arguments}}")
    # Templates iterate over the arguments, so a call without any gets an empty object.
    if call.get("arguments") is None:
        return {**call, "arguments": {}}
    arguments = _parsed(call["arguments"], f"the arguments of the tool call {name!r}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of the tool call {name!r} must be a JSON object, found {arguments!r:.80}")
    return {**call, "arguments": arguments}


def _parsed(value: Any, location: str) -> Any:
    """Parse JSON text. Return other values unchanged.

    Raises:
        ValueError: the text is not valid JSON. The message begins with `location`.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{location} is not valid JSON ({error}): {value!r:.80}; correct or remove the row") from error


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """Parse definitions of tools: a list of JSON schemas, or JSON text of the list or of its items.

    Raises:
        ValueError: the value is something else.
    """
    tools = _parsed(value, "column 'tools'")
    if isinstance(tools, Mapping):
        tools = [tools]
    if isinstance(tools, Sequence) and not isinstance(tools, str):
        tools = [_parsed(tool, "column 'tools'") for tool in tools]
        if all(isinstance(tool, Mapping) for tool in tools):
            return [dict(tool) for tool in tools]
    raise ValueError(f"column 'tools' must be a list of JSON schemas, or JSON text of it, found {value!r:.80}")

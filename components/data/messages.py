"""Chat messages in the form of chat templates, `{role, content, tool_calls}`, and checks of prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from components.data.values import kind_of

ASSISTANT = "assistant"
"""Role of messages that the model learns."""
TOOLS = "tools"
"""Column with definitions of tools."""


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


def _with_parsed_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message with its tool calls parsed.

    OpenAI's form has the arguments as JSON text, which a chat template would encode a second time.
    """
    copy = dict(message)
    calls = copy.get("tool_calls")
    if calls is None and isinstance(copy.get("function_call"), Mapping):
        calls = [copy.pop("function_call")]  # the older field of OpenAI's API, for a single call
        copy["tool_calls"] = calls
    if not calls:
        return copy
    calls = parsed(calls, "'tool_calls'")
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
    arguments = parsed(call["arguments"], f"the arguments of the tool call {name!r}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of the tool call {name!r} must be a JSON object, found {arguments!r:.80}")
    return {**call, "arguments": arguments}


def parsed(value: Any, location: str) -> Any:
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


def needs_template(name: str, value: Any) -> ValueError:
    """Return the error for a column that can only be used with a chat template."""
    return ValueError(
        f"column {name!r} holds {value!r:.80}, which only a chat template can write, and prompts are read as plain "
        f"text; set data.apply_chat_template=true, or data.ignored_columns={name} to leave it out"
    )


def check_prompt(prompt: Any, where: str, key: str = "prompt_key") -> None:
    """Check that a prompt is text or a list of messages, and not empty. `key` is the option that names its column.

    Raises:
        ValueError: the prompt is something else, or is empty.
    """
    if isinstance(prompt, str) and not is_blank(prompt):
        return
    if isinstance(prompt, str):
        raise ValueError(f"{where}: the prompt {prompt!r:.20} is empty; remove the row, or set {key} to another field")
    if not prompt or not are_messages(prompt):
        raise ValueError(
            f"{where}: expected a string or a list of {{role, content}} messages, found {kind_of(prompt)}; "
            f"set {key} to the field with the prompt"
        )
    if all(m["role"] == "system" or (is_blank(m["content"]) and not m.get("tool_calls")) for m in prompt):
        raise ValueError(f"{where}: all messages but the system's are empty; add a user's message")


def is_blank(value: object) -> bool:
    """Return True for None, for empty lists and objects, and for text that is empty or all white space."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, Sequence | Mapping) and not value)

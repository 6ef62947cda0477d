"""Chat messages in the form of chat templates, `{role, content, tool_calls}`, and checks of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.data.values import kind_of

CHAT = "chat prompt"
"""Kind of the plug-in that renders prompts with the chat template."""
ASSISTANT = "assistant"
"""Role of messages that the model learns."""
TOOLS = "tools"
"""Column with definitions of tools."""


def are_messages(value: object) -> bool:
    """Return True for a list of chat messages, each with `role` and `content`."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in value)


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

"""Messages of a row with its system prompt and its tools, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.data.chat import as_messages, check_tools_written, render_chat, with_system

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["complete_messages", "render_chat"]


def complete_messages(
    prompt: str | Sequence[Mapping[str, Any]],
    system: str | None,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """Return the messages of a prompt with its system prompt, and check that the template writes its tools.

    Args:
        prompt: a string, or chat messages.
        system: system prompt, or None.
        tools: definitions of tools, which may be empty.
        tokenizer: tokenizer with the chat template.

    Raises:
        ValueError: the messages begin with another system prompt, or the template does not write the tools.
    """
    messages = with_system(as_messages(prompt), system)
    if tools:
        check_tools_written(messages, tools, tokenizer)
    return messages

"""Chat messages as the text of a chat template: tool calls, system prompts and tools, and the rendering itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.data.messages import ASSISTANT
from components.data.model_tokens import check_template
from components.net.hub import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def render_chat(
    prompt: str | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
) -> str:
    """Render a prompt with the chat template; see `text.render_prompt`.

    Raises:
        ValueError: there is no chat template, or it rejects the messages.
    """
    messages = as_messages(prompt)
    if continue_final_message and messages[-1]["role"] == ASSISTANT:
        return _templated(messages, tokenizer, tools=tools, continue_final_message=True)
    return _templated(messages, tokenizer, tools=tools, add_generation_prompt=True)


def render_conversation(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Render chat messages, including the responses of the assistant, with the chat template."""
    return _templated(as_messages(messages), tokenizer, tools=tools)


def check_tools_written(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that the chat template writes the definitions of tools.

    Raises:
        ValueError: the text is the same with and without tools.
    """
    # Templates ignore variables that they do not use, without an error.
    if tools and render_conversation(messages, tokenizer, tools) == render_conversation(messages, tokenizer):
        raise ValueError(
            f"the row has definitions of tools ({tools[0]!r:.80}), which the chat template does not write; set "
            "model.chat_template to one that does, or data.ignored_columns=tools to train without them"
        )


def _templated(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    schemas = [dict(tool) for tool in tools or ()] or None
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; set apply_chat_template=False, with prompts as strings")
    try:
        text = _filled(messages, tokenizer, {"tools": schemas, **options})
    except Exception as error:  # a template is a program and can raise anything
        reason = first_line(error)
        raise ValueError(f"the chat template rejects {messages!r:.200} ({reason}); correct one of the two") from error
    assert isinstance(text, str)
    check_template(tokenizer)
    return text


def _filled(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> Any:
    """Fill in the chat template, without writing the word None for the null content of a message with tool calls."""
    if all(message.get("content") is not None for message in messages):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    empty = [{**message, "content": message.get("content") or ""} for message in messages]
    with_empty = tokenizer.apply_chat_template(empty, tokenize=False, **options)
    try:
        # Null is the form of OpenAI's API, and some templates test for it.
        with_null = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except TypeError:  # a template that concatenates contents with other text
        return with_empty
    # A template that writes the content would write Python's None into the text.
    if str(with_null).count("None") > str(with_empty).count("None"):
        return with_empty
    return with_null

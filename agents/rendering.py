"""Encoding of the policy's input. Each text is encoded once, and earlier tokens are never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from agents.schema import Observation
from components.data.text import TextEncoder, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "what-the-policy-wrote"
"""Placeholder for a turn of the policy in a rendered conversation, of which only the text after it is used."""


def first_tokens(
    encoder: TextEncoder, observation: Observation, prompt: str = "", tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Encode the beginning of a sequence.

    Messages are rendered with the chat template, up to the start of the policy's turn. If the last message is the
    assistant's, the policy continues it.

    Args:
        encoder: encoder with the policy's tokenizer.
        observation: text, or messages.
        prompt: text of the prompt in the data.
        tools: JSON schemas of functions. A chat template that supports tools renders them in its own format, and a
            system message at the beginning of the observation is omitted.

    Raises:
        ValueError: the observation is empty, the tokenizer has no chat template for messages or no token for a
            character, or a message contains a `prompt` that was rendered with the chat template already.
    """
    if not isinstance(observation, str):
        refuse_rendered(encoder, observation, prompt)
    if tools and "tools" not in str(encoder.tokenizer.chat_template):
        tools = ()
    if tools and not isinstance(observation, str) and observation[0]["role"] == "system":
        observation = observation[1:]
    text = render_prompt(observation, encoder.tokenizer, tools=tools, continue_final_message=True)
    tokens = encoder.encode_prompt(text)
    if not tokens:
        raise ValueError("reset returned an empty observation; return a text or messages for the policy")
    return tokens


def refuse_rendered(encoder: TextEncoder, messages: Sequence[Mapping[str, Any]], prompt: str) -> None:
    """Raise ValueError if a message contains a prompt with special tokens of a chat template.

    Special tokens in other text are allowed.
    """
    special = next((text for text in _special(encoder).values() if text in prompt), None)
    if special and any(prompt.strip() in str(message["content"]) for message in messages):
        raise ValueError(
            f"a message contains the prompt {prompt!r:.200} with the special token {special!r}: it was already "
            "rendered with the chat template; set data.apply_chat_template=false, so that prompts are plain text"
        )


def refuse_mixed(encoder: TextEncoder, opening: Sequence[int], feedback: Observation, tokens: Sequence[int]) -> None:
    """Raise ValueError if messages follow an opening in plain text, because the policy would read half a conversation.

    Text may follow messages: it continues the policy's turn.

    Args:
        encoder: encoder with the policy's tokenizer.
        opening: tokens of the first observation.
        feedback: feedback of the environment.
        tokens: tokens of the feedback.
    """
    marks = set(_special(encoder)).difference([encoder.tokenizer.bos_token_id])
    if not isinstance(feedback, str) and marks & set(tokens) and not marks & set(opening):
        problem = "the feedback is a list of chat messages, but the first observation is plain text"
        raise ValueError(f"{problem}; return messages from reset too, or set data.apply_chat_template=true")


def feedback_tokens(encoder: TextEncoder, feedback: Observation, before: Sequence[int]) -> list[int]:
    """Encode the environment's feedback after a turn of the policy, up to the start of the next turn.

    Text is encoded unchanged. Messages are rendered in a short conversation after a placeholder turn, and the text
    after the placeholder is used: the end of the turn, unless the policy has written it, and the messages. So the
    rendering of earlier turns by the template does not matter.

    Args:
        encoder: encoder with the policy's tokenizer.
        feedback: text, or the new messages, each with `role` and `content`.
        before: all tokens before the feedback. They are not changed.

    Raises:
        ValueError: the tokenizer has no chat template, the template rejects the messages or omits turns, or a character
            has no token.
    """
    if feedback == "":
        return []
    if isinstance(feedback, str):
        return encoder.encode(feedback)
    tokenizer: Any = encoder.tokenizer
    opening = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    _, mark, rest = render_prompt([*opening, *feedback], tokenizer).rpartition(MARK)
    if not mark:
        raise ValueError("the chat template omits the assistant's messages; return feedback as text")
    tokens = encoder.encode(rest)
    # Added tokens mark structure, such as the end of a turn, also if they are not declared as special.
    marks = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    first = next((place for place, token in enumerate(tokens) if token in marks), None)
    if first is None or not before:
        return tokens
    if tokens[first] == before[-1]:
        return tokens[first + 1 :]
    if first == 0 and before[-1] in _special(encoder):
        # The turn ended with another end token, so the template's end token is dropped. A template without an end token
        # begins with the mark of a role instead, which is kept.
        closing = render_prompt(opening, tokenizer).rpartition(MARK)[2]
        if encoder.encode(closing)[:1] == tokens[:1]:
            return tokens[1:]
    return tokens


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
    """Return the text of tokens. The result is that of `tokenizer.decode`, in a quarter of its time."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
    return backend.decode(tokens, skip_special_tokens=skip_special_tokens)


@lru_cache(maxsize=16)
def _special(encoder: TextEncoder) -> dict[int, str]:
    """Return id -> text of the special tokens, without added tokens that are ordinary text, such as `<tool_call>`."""
    tokenizer: Any = encoder.tokenizer
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))

"""Token ids of what the policy reads: each text is encoded once, and what stands before it is never touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from agents.schema import Observation
from components.data.text import TextEncoder, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "what-the-policy-wrote"
"""Stands for the policy's turn in a rendering of which only what follows it is used."""


def first_tokens(
    encoder: TextEncoder, observation: Observation, prompt: str = "", tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Encode what begins a sequence; messages go through the chat template, up to the start of the policy's turn, or
    to the end of a last message of the assistant, which the policy continues.

    Args:
        encoder: of the policy's tokenizer.
        observation: text, or messages.
        prompt: of the data.
        tools: JSON schemas of functions. A chat template with a place for tools writes them in its own way, and the
            system message that the observation begins with is left out.

    Raises:
        ValueError: there is nothing to read, no chat template for messages, no token for a character, or a message
            holds the data's `prompt`, which has been through the chat template already.
    """
    if not isinstance(observation, str):
        refuse_rendered(encoder, observation, prompt)
    takes_tools = bool(tools) and "tools" in str(encoder.tokenizer.chat_template)
    if takes_tools and not isinstance(observation, str) and observation[0]["role"] == "system":
        observation = observation[1:]
    tools = tools if takes_tools else ()
    text = render_prompt(observation, encoder.tokenizer, tools=tools, continue_final_message=True)
    tokens = encoder.encode_prompt(text)
    if not tokens:
        raise ValueError("reset returned an empty observation; give the policy something to read")
    return tokens


def refuse_rendered(encoder: TextEncoder, messages: Sequence[Mapping[str, Any]], prompt: str) -> None:
    """Raise ValueError where a message holds a prompt with marks of a chat template; other words may hold them."""
    special = next((text for text in _special(encoder).values() if text in prompt), None)
    if special and any(prompt.strip() in str(message["content"]) for message in messages):
        raise ValueError(
            f"a message holds the prompt {prompt!r:.200}, which holds the special token {special!r}: it has been "
            "through the chat template already; set data.apply_chat_template=false, and give prompts as text"
        )


def refuse_mixed(encoder: TextEncoder, opening: Sequence[int], feedback: Observation, tokens: Sequence[int]) -> None:
    """Raise ValueError where messages, encoded as `tokens`, follow an opening that has not been through the chat
    template: the policy would read half a conversation. Text may follow messages: it continues the policy's own turn.
    """
    marks = set(_special(encoder)).difference([encoder.tokenizer.bos_token_id])
    if not isinstance(feedback, str) and marks & set(tokens) and not marks & set(opening):
        why = "the feedback is chat messages, and what the policy read first is plain text"
        raise ValueError(f"{why}; let reset return messages too, or set data.apply_chat_template=true")


def feedback_tokens(encoder: TextEncoder, feedback: Observation, before: Sequence[int]) -> list[int]:
    """Encode what the environment says after a turn of the policy, up to the start of its next one.

    Text is encoded as it is. Of messages, the chat template writes a short conversation in which they stand after a
    turn, and what it wrote after that turn is taken: first what closes it, unless the policy has written that itself,
    and then the messages. So it does not matter what the template makes of earlier turns.

    Args:
        encoder: of the policy's tokenizer.
        feedback: text, or the new messages, each with `role` and `content`.
        before: all tokens up to there; they are only looked at.

    Raises:
        ValueError: there is no chat template, it refuses the messages or leaves out turns, or a character has no token.
    """
    if isinstance(feedback, str):
        return encoder.encode(feedback) if feedback else []
    tokenizer: Any = encoder.tokenizer
    opening = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    _, mark, rest = render_prompt([*opening, *feedback], tokenizer).rpartition(MARK)
    if not mark:
        raise ValueError("the chat template leaves out the assistant's messages; give feedback as text")
    tokens = encoder.encode(rest)
    # Special or not, a token that was added stands for structure, as the end of a turn does.
    marks = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    first = next((place for place, token in enumerate(tokens) if token in marks), None)
    if first is None or not before:
        return tokens
    if tokens[first] == before[-1]:
        return tokens[first + 1 :]
    if first == 0 and before[-1] in _special(encoder):
        # It ended with another end token. The template may also close nothing, and begin with the mark of a role.
        closing = render_prompt(opening, tokenizer).rpartition(MARK)[2]
        return tokens[encoder.encode(closing)[:1] == tokens[:1] :]
    return tokens


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
    """The text of tokens, as `tokenizer.decode` gives it, without the detours that make it take four times as long."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
    return backend.decode(tokens, skip_special_tokens=skip_special_tokens)


@lru_cache(maxsize=16)
def _special(encoder: TextEncoder) -> dict[int, str]:
    """Ids and texts of the tokens that stand for structure alone; `<tool_call>` and the like are none of them."""
    tokenizer: Any = encoder.tokenizer
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))

"""Chat messages of demonstrations and pairs: which of them the model learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.data.messages import ASSISTANT


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

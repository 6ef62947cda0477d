"""Prompts of a run: tokenized for the policy, and described for the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from training.options.data_options import DataOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.prompts import PromptSource


def read_prompts(
    data: DataOptions,
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    heldout: bool = False,
    info: Callable[[str], None],
) -> PromptSource:
    """Tokenize the rows of prompts. Report the number of prompts that are too long."""
    # Held-out prompts keep their order, so that two evaluations can be compared row by row.
    source = data.source(rows, tokenizer, seed, shuffle=not heldout)
    if count := source.too_long or source.cut:
        kind = "held-out prompts" if heldout else "prompts"
        effect = "left out" if source.too_long else f"cut (data.overlong={data.overlong})"
        info(f"{count} {kind} of more than data.max_prompt_tokens={data.max_prompt_tokens} tokens are {effect}")
    return source


def describe_prompts(data: DataOptions, source: PromptSource) -> list[str]:
    """Describe the columns, the first prompt, and the number of prompts that end with an assistant message."""
    columns = data.describe_columns(list(map(dict, source.rows)))
    lines = [text for text in (columns, source.describe_first()) if text]
    if source.prefilled:
        lines.append(
            f"{source.prefilled} of {len(source.rows)} prompts end with a message of the assistant, which the policy "
            "continues"
        )
    return lines


def unused_template(data: DataOptions, prompt: Any, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a warning if the tokenizer has a chat template that would change prompts and is not used, else None."""
    from components.data.text import render_prompt

    is_plain = isinstance(prompt, str) and not data.apply_chat_template and data.input_template is None
    if not is_plain or not tokenizer.chat_template:
        return None
    try:
        changes_nothing = render_prompt(prompt, tokenizer, apply_chat_template=True) == prompt
    except ValueError:  # the template rejects such a conversation, so it could not be used
        return None
    if changes_nothing:
        return None
    return (
        "warning: the tokenizer has a chat template, but prompts are used as plain text without it; for an instruct "
        "model set data.apply_chat_template=true"
    )

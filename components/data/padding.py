"""Choice of a padding token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pad_apart_from_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Choose a padding token that differs from the end token.

    Classifiers of transformers use the last token that is not padding as the end of a row, so an end token that is also
    the padding token would not be seen. The first other special token becomes the padding token. Without one, it is the
    last piece of the vocabulary with a marker for the blank before it. Special tokens are matched literally in texts,
    and no text contains that marker.

    Returns:
        The chosen token, or None if the tokenizer's own padding token differs already.

    Raises:
        ValueError: there is no such token.
    """
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return None
    candidates = [token for token in tokenizer.all_special_tokens if token != tokenizer.eos_token]
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda piece: -piece[1])
    candidates += [piece for piece, _ in pieces if len(piece) > 1 and piece[0] in "Ġ▁"][:1]
    if not candidates:
        raise ValueError("the tokenizer has no token for padding but its end token; set another in its pad_token")
    tokenizer.pad_token = candidates[0]
    return candidates[0]

"""One-line descriptions, in ASCII, of training examples, with marks around the text that is learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from components.data.shown import MOST_CHARACTERS, ids_text, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEARNT = "[[learnt]]", "[[/learnt]]"
"""Marks before and after the text of tokens that the loss counts."""

MOST_STRETCHES = 8
"""Maximum number of stretches that are shown of an example. A stretch is a run of tokens that are all learnt, or all
not."""


def described_example(
    ids: Sequence[int], is_learnt: Sequence[bool], tokenizer: PreTrainedTokenizerBase, limit: int = MOST_CHARACTERS
) -> str:
    """Describe a training example in one line: its text with marks around learnt tokens, and its first token ids.

    Args:
        ids: token ids of the example.
        is_learnt: for each token, True if the loss counts it.
        tokenizer: tokenizer of the model.
        limit: maximum number of characters from the start of each stretch.
    """
    stretches = list(_stretches(is_learnt))
    last = MOST_STRETCHES // 2
    first = MOST_STRETCHES - last
    left_out = max(len(stretches) - first - last, 0)
    parts: list[str] = []
    for number, (begin, end, is_counted) in enumerate(stretches):
        if left_out and first <= number < first + left_out:
            if number == first:
                parts.append(f" ... ({left_out} stretches left out) ... ")
            continue
        # Decoded in one piece per stretch, because a character may consist of several tokens.
        shown = shortened(str(tokenizer.decode(list(ids[begin:end]))), limit)
        if is_counted:
            shown = f"{LEARNT[0]}{shown}{LEARNT[1]}"
        parts.append(shown)
    learnt = [f"{begin} to {end - 1}" for begin, end, is_counted in stretches if is_counted]
    ranges = ", ".join(learnt[:MOST_STRETCHES])
    if len(learnt) > MOST_STRETCHES:
        ranges += ", ..."
    count = sum(map(bool, is_learnt))
    return f"({len(ids)} tokens, learnt are {count}: {ranges or 'none'}): {''.join(parts)}; {ids_text(ids)}"


def _stretches(is_learnt: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    begin = 0
    for learnt, group in groupby(map(bool, is_learnt)):
        end = begin + len(list(group))
        yield begin, end, learnt
        begin = end

"""One-line descriptions, in ASCII, of the first text that a model reads or learns, for the start of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEARNT = "[[learnt]]", "[[/learnt]]"
"""Marks before and after the text of tokens that the loss counts."""
MOST_CHARACTERS = 300
"""Maximum number of characters that are shown from the start of a text."""
MOST_IDS = 32
"""Maximum number of token ids that are shown."""
MOST_STRETCHES = 8
"""Maximum number of stretches that are shown of an example. A stretch is a run of tokens that are all learnt, or all
not."""


def described(text: str, ids: Sequence[int], limit: int = MOST_CHARACTERS) -> str:
    """Describe a prompt in one line: its text, up to about `limit` characters, and its first token ids."""
    return f"({len(text)} characters, {len(ids)} tokens): {_shortened(text, limit)}; {_ids(ids)}"


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
        shown = _shortened(str(tokenizer.decode(list(ids[begin:end]))), limit)
        if is_counted:
            shown = f"{LEARNT[0]}{shown}{LEARNT[1]}"
        parts.append(shown)
    learnt = [f"{begin} to {end - 1}" for begin, end, is_counted in stretches if is_counted]
    ranges = ", ".join(learnt[:MOST_STRETCHES])
    if len(learnt) > MOST_STRETCHES:
        ranges += ", ..."
    count = sum(map(bool, is_learnt))
    return f"({len(ids)} tokens, learnt are {count}: {ranges or 'none'}): {''.join(parts)}; {_ids(ids)}"


def _stretches(is_learnt: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    begin = 0
    for learnt, group in groupby(map(bool, is_learnt)):
        end = begin + len(list(group))
        yield begin, end, learnt
        begin = end


def _shortened(text: str, limit: int) -> str:
    """Return the repr of a text, without the middle of a long one."""
    # The end is shown too: it has the generation prompt or the end token, where templates often go wrong.
    end = limit // 5
    if len(text) <= limit + end:
        return repr(text)
    return f"{text[:limit]!r} ... ({len(text) - limit - end} characters left out) ... {text[len(text) - end :]!r}"


def _ids(ids: Sequence[int]) -> str:
    if len(ids) > MOST_IDS:
        return f"token ids, the first {MOST_IDS} of {len(ids)}: {list(ids[:MOST_IDS])}"
    return f"token ids: {list(ids)}"

"""What a model reads and learns, in one line of plain ASCII marks, for the start of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEARNT = "[[learnt]]", "[[/learnt]]"
"""Marks around the text of tokens that are learnt."""
MOST_CHARACTERS = 300
"""Characters of a text that are shown from its beginning."""
MOST_IDS = 32
"""Token ids that are shown."""
MOST_STRETCHES = 8
"""Stretches of tokens, learnt or not, that are shown of an example."""


def described(text: str, ids: Sequence[int], limit: int = MOST_CHARACTERS) -> str:
    """Describe what a policy reads in one line: the text, up to so many characters, and the first ids."""
    return f"({len(text)} characters, {len(ids)} tokens): {_shortened(text, limit)}; {_ids(ids)}"


def described_example(
    ids: Sequence[int], is_learnt: Sequence[bool], tokenizer: PreTrainedTokenizerBase, limit: int = MOST_CHARACTERS
) -> str:
    """Describe an example to learn from in one line: its text with marks around what is learnt, and the first ids.

    Args:
        ids: of the tokens.
        is_learnt: of each, True where the loss counts it.
        tokenizer: of the model.
        limit: characters that are shown of each stretch.
    """
    stretches = list(_stretches(is_learnt))
    first, last = MOST_STRETCHES - MOST_STRETCHES // 2, MOST_STRETCHES // 2
    left_out = max(len(stretches) - first - last, 0)
    parts: list[str] = []
    for number, (begin, end, learnt) in enumerate(stretches):
        if left_out and first <= number < first + left_out:
            parts += [f" ... ({left_out} stretches left out) ... "] if number == first else []
            continue
        shown = _shortened(str(tokenizer.decode(list(ids[begin:end]))), limit)
        parts.append(f"{LEARNT[0]}{shown}{LEARNT[1]}" if learnt else shown)
    learnt = [f"{begin} to {end - 1}" for begin, end, is_on in stretches if is_on]
    places = ", ".join(learnt[:MOST_STRETCHES]) + (", ..." if len(learnt) > MOST_STRETCHES else "")
    count = sum(map(bool, is_learnt))
    return f"({len(ids)} tokens, learnt are {count}: {places or 'none'}): {''.join(parts)}; {_ids(ids)}"


def _stretches(is_learnt: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    begin = 0
    for learnt, group in groupby(map(bool, is_learnt)):
        end = begin + len(list(group))
        yield begin, end, learnt
        begin = end


def _shortened(text: str, limit: int) -> str:
    """Return the text as Python writes it, without what is in the middle of a long one."""
    end = limit // 5
    if len(text) <= limit + end:
        return repr(text)
    return f"{text[:limit]!r} ... ({len(text) - limit - end} characters left out) ... {text[len(text) - end :]!r}"


def _ids(ids: Sequence[int]) -> str:
    more = f", the first {MOST_IDS} of {len(ids)}" if len(ids) > MOST_IDS else ""
    return f"token ids{more}: {list(ids[:MOST_IDS])}"

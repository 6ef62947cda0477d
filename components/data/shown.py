"""One-line descriptions, in ASCII, of the first text that a model reads or learns, for the start of a run."""

from __future__ import annotations

from collections.abc import Sequence

MOST_CHARACTERS = 300
"""Maximum number of characters that are shown from the start of a text."""
MOST_IDS = 32
"""Maximum number of token ids that are shown."""


def described(text: str, ids: Sequence[int], limit: int = MOST_CHARACTERS) -> str:
    """Describe a prompt in one line: its text, up to about `limit` characters, and its first token ids."""
    return f"({len(text)} characters, {len(ids)} tokens): {shortened(text, limit)}; {ids_text(ids)}"


def shortened(text: str, limit: int) -> str:
    """Return the repr of a text, without the middle of a long one."""
    # The end is shown too: it has the generation prompt or the end token, where templates often go wrong.
    end = limit // 5
    if len(text) <= limit + end:
        return repr(text)
    return f"{text[:limit]!r} ... ({len(text) - limit - end} characters left out) ... {text[len(text) - end :]!r}"


def ids_text(ids: Sequence[int]) -> str:
    if len(ids) > MOST_IDS:
        return f"token ids, the first {MOST_IDS} of {len(ids)}: {list(ids[:MOST_IDS])}"
    return f"token ids: {list(ids)}"

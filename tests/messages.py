"""Patterns for the facts of a message, independent of its wording."""

from __future__ import annotations

import re


def says(*facts: object) -> str:
    """A pattern for `pytest.raises(match=...)` and `re.search`: each fact is in the text, in any order.

    A fact is what the user needs and no rewording may lose: an option, a value that was found, a path, a role.
    """
    return "(?s)" + "".join(f"(?=.*{re.escape(str(fact))})" for fact in facts)

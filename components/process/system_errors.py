"""Numbers of system errors in messages of libraries that are written in Rust, such as safetensors and tokenizers."""

from __future__ import annotations

import re


def system_error_number(message: str) -> int | None:
    """Return the number in `(os error N)`, or None for a message without one."""
    # These libraries raise exceptions without an errno, and only the text has the number.
    match = re.search(r"\(os error (\d+)\)", message)
    return match and int(match[1])

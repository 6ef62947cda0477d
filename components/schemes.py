"""Names with a scheme, such as `task:sort`: values of options that stand for something that a plug-in makes.

A plug-in provides a callable by its scheme. The callable takes the text after the colon.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from components.registry import load, names

_NAME = re.compile(r"([a-z][a-z0-9_]*):(?!//)(.*)", re.DOTALL)
"""A URL has no scheme in this sense."""


def has_scheme_of(kind: str, text: str) -> bool:
    """Return True if a plug-in provides the scheme of a name."""
    return text.partition(":")[0] in names(kind) and ":" in text


def made_by_scheme(kind: str, text: str) -> Any | None:
    """Make what a name stands for.

    Args:
        kind: of the plug-in, such as `data source`.
        text: value of an option.

    Returns:
        What the plug-in's callable returns; None for a path, a URL, or a name without a scheme.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: the plug-in refuses the rest of the name.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    scheme, name = match.groups()
    if scheme not in names(kind) and Path(text).expanduser().exists():
        return None
    return load(kind, scheme)(name)

"""Names with a scheme, such as `task:sort`: values of options for which a plug-in creates an object.

A plug-in registers a callable under its scheme. The callable gets the text after the colon.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from components.registry import load, names

_NAME = re.compile(r"([a-z][a-z0-9_]*):(?!//)(.*)", re.DOTALL)
"""A name with a scheme. URLs, with `//` after the colon, do not match."""


def has_scheme_of(kind: str, text: str) -> bool:
    """Return True if a plug-in provides the scheme of a name."""
    return text.partition(":")[0] in names(kind) and ":" in text


def made_by_scheme(kind: str, text: str) -> Any | None:
    """Create the object for a name with a scheme.

    Args:
        kind: kind in the registry, such as `data source`.
        text: value of an option.

    Returns:
        The result of the plug-in's callable, or None for a path, a URL, or a name without a scheme.

    Raises:
        MissingPlugin: no plug-in provides the scheme.
        ValueError: the plug-in rejects the rest of the name.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    scheme, name = match.groups()
    if scheme not in names(kind) and Path(text).expanduser().exists():
        return None  # a file whose name contains a colon
    return load(kind, scheme)(name)

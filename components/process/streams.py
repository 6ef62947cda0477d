"""Encoding errors of standard output and standard error."""

from __future__ import annotations

import io
import sys


def accept_any_text() -> None:
    """Make stdout and stderr of this process accept every text.

    A character that their encoding lacks, such as an emoji in an ASCII terminal, or a lone surrogate, is written as an
    escape. The encoding does not change.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

"""Standard output and error of a program, whatever text is written to them."""

from __future__ import annotations

import io
import sys


def accept_any_text() -> None:
    """Let stdout and stderr of this process take every text: of a character that their encoding lacks, such as an emoji
    in an ASCII terminal, or of half a surrogate pair, the code is written. The encoding stays.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

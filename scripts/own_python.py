"""Lets a script that people start with any `python` run in the project's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parents[1] / ".venv"


def use_own_python() -> None:
    """Go on in the Python of .venv, where there is one, this is another, and TROUPE_PYTHON names none."""
    python = VENV / "bin" / "python"
    if Path(sys.prefix).resolve() != VENV and python.is_file() and not os.environ.get("TROUPE_PYTHON"):
        os.execv(python, [str(python), *sys.argv])

"""Lets a script that people start with any `python` run in the project's own."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parents[1] / ".venv"
STARTED = "TROUPE_STARTED_IN"
"""The process that has continued in another Python already. What starts a Python may hide which one it is."""


def reexec_in_venv() -> None:
    """Go on in the Python that TROUPE_PYTHON names, else in that of .venv, where it is there and this is another."""
    given = os.environ.get("TROUPE_PYTHON")
    python = shutil.which(given or str(VENV / "bin" / "python"))
    is_this = python == sys.executable if given else Path(sys.prefix).resolve() == VENV.resolve()
    if python and not is_this and os.environ.get(STARTED) != str(os.getpid()):
        os.environ[STARTED] = str(os.getpid())
        os.execv(python, [python, *sys.argv])

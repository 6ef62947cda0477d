"""Continue a script in the project's Python, whichever `python` it was started with."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parents[1] / ".venv"
STARTED = "TROUPE_STARTED_IN"
"""Environment variable with the id of the process that has already continued in another Python.

Without it a wrapper, whose sys.executable differs from the path that was started, would restart without end.
"""


def reexec_in_venv() -> None:
    """Continue in the Python of TROUPE_PYTHON, or else of .venv. Do nothing if it does not exist or is this one."""
    override = os.environ.get("TROUPE_PYTHON")
    python = shutil.which(override or str(VENV / "bin" / "python"))
    is_current = Path(sys.prefix).resolve() == VENV.resolve()
    if override:
        is_current = python == sys.executable
    if python and not is_current and os.environ.get(STARTED) != str(os.getpid()):
        os.environ[STARTED] = str(os.getpid())
        os.execv(python, [python, *sys.argv])

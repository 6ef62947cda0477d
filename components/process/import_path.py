"""The import path of child processes that run modules of this project."""

from __future__ import annotations

import os
import site
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[__name__.count(".")]
"""The folder from which this code is imported: the root of a clone, or the folder into which the wheel is installed."""


def import_path(inherited: str | None) -> str:
    """Return the PYTHONPATH with which a child process imports this code; `inherited` is that of its parent."""
    # Python searches its site folders anyway. On PYTHONPATH they would come before the standard library.
    folders = {Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())}
    return os.pathsep.join(filter(None, ["" if PROJECT in folders else str(PROJECT), inherited]))

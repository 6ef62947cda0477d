"""Start of modules of this project as separate programs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from components.process.import_path import with_our_path


def start_program(module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start `python -m module` with this project on its path, in any working directory. `options` are for Popen."""
    env = with_our_path(options.pop("env", os.environ))
    # Without -P, a folder `components` in the working directory would be imported instead of ours.
    return subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], env=env, text=True, **options)

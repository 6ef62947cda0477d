"""Modules of ours as programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from components.process.child_process import with_our_path


def start_program(module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start `python -m module`, which finds our code wherever the caller is; options are those of Popen."""
    env = with_our_path(options.pop("env", os.environ))
    # -P keeps a `components` folder in the caller's working directory from being taken for ours.
    return subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], env=env, text=True, **options)

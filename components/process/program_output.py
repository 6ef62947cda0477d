"""Output of programs such as git and nvidia-smi, with a timeout."""

from __future__ import annotations

import logging
import subprocess

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
"""Timeout of a program such as git, in seconds. A network disk may hang, and the run must start anyway."""


def output_of(program: str, *arguments: str, env: dict[str, str] | None = None) -> str | None:
    """Return the output of a program, or None if it is missing, fails or exceeds the timeout."""
    try:
        result = subprocess.run(
            [program, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=env,
            timeout=_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("no output from %s: %s", program, error)
        return None
    return result.stdout

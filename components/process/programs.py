"""Programs that run in a process group of their own, and the texts of their output."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any


async def run_program(
    command: Sequence[str],
    limit_s: float | None = None,
    started: Callable[[], None] | None = None,
    until: Collection[asyncio.Future[Any]] = (),
    **options: Any,
) -> int | None:
    """Run a program in its own process group, and kill the group at the end, also if the caller is cancelled.

    Args:
        command: the program and its arguments.
        limit_s: timeout in seconds.
        started: called when the program has started.
        until: futures. The program is killed as soon as one of them is done.
        options: options of `asyncio.create_subprocess_exec`.

    Returns:
        The exit code, or the negated number of the signal that ended the program. None after the timeout, or if a
        future of `until` was done first.
    """
    program = await asyncio.create_subprocess_exec(*command, start_new_session=True, **options)
    try:
        if started is not None:
            started()
        ends = {asyncio.ensure_future(program.wait()), *until}
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return program.returncode
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        await asyncio.shield(program.wait())


def cut_text(text: str, length: int) -> str:
    """Return the first `length` characters of a text, followed by a note if it was longer."""
    if len(text) > length:
        return f"{text[:length]}\n... ({len(text)} characters, cut after {length})"
    return text

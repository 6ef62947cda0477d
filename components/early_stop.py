"""Ctrl-C and SIGTERM while a program is still importing, which takes longer than a hand needs.

The first import of a program's main module: from there on either signal ends the program with one line, without a
traceback of the import that it met. `Command.run` handles them once everything is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stop_line(name: str) -> str:
    """The line about a program that was stopped before it had begun."""
    return f"{name}: stopped before the start"


def _end(number: int, _: FrameType | None) -> None:
    program = getattr(sys.modules["__main__"], "__package__", None) or sys.argv[0]
    os.write(2, f"{stop_line(program.rpartition('.')[2])}\n".encode(errors="backslashreplace"))
    os._exit(128 + number)


def _is_main_module_imported_by(module: str) -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.endswith(f".{module}")


if _is_main_module_imported_by("main"):
    for _number in SIGNALS:
        signal.signal(_number, _end)
    # scripts/run_recipe.sh starts the program with both held back, so that none comes before this line.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

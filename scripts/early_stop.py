"""Start a module as a program that ends with one line on Ctrl-C or SIGTERM, also while it is still importing.

    python -P scripts/early_stop.py recipes.grpo.main [ARGUMENT ...]

Importing takes seconds, and a signal that arrives meanwhile would print a traceback of whatever import it interrupted.
`Command.run` handles signals once everything is imported.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Run the module that the first argument names, with the other arguments."""
    module = sys.argv.pop(1)
    name = module.removesuffix(".main").rpartition(".")[2]

    def end(number: int, _: FrameType | None) -> None:
        os.write(2, f"{name}: stopped before the start\n".encode(errors="backslashreplace"))
        os._exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, end)
    # scripts/run_recipe.sh blocks both until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

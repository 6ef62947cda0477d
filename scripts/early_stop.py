"""Run a module so that Ctrl-C or SIGTERM ends it with one line, even while it is still importing.

    python -P scripts/early_stop.py recipes.grpo.main [ARGUMENT ...]

Imports take seconds. A signal during an import would print the traceback of that import. `Command.run` handles signals
after all imports.
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
    # scripts/run_recipe.sh starts Python with both blocked, so that a signal before this line is not lost.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

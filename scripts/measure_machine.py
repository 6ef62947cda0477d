"""Measure the speed of this machine, and write it to the cache folder: `python scripts/measure_machine.py`.

It takes about 20 s on a CPU. A run then shows how far each phase is from what the machine allows, and `--dry_run`
predicts its time. `--show` prints the cached numbers, or those of the table of GPUs, without measuring.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from reexec_in_venv import reexec_in_venv

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the project may not be installed


def main(arguments: list[str] | None = None) -> int:
    """Measure and write, or show. Return the exit code: 0 done, 1 nothing is known, 2 the plug-in is missing."""
    from components.registry import MissingPlugin, load

    parser = argparse.ArgumentParser(prog="measure_machine.py", description="Measure the speed of this machine.")
    parser.add_argument("--show", action="store_true", help="print the known numbers as JSON, and measure nothing")
    parser.add_argument(
        "--threads", type=int, help="threads of a worker, for small models in the engines (default: torch's; 0: none)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.show:
            speed = load("machine speed", "cached")()
            if speed is None:
                print("measure_machine.py: nothing is measured here; run it without --show", file=sys.stderr)
                return 1
            print(json.dumps(asdict(speed), indent=1))
            return 0
        measure, write = load("machine speed", "measure"), load("machine speed", "write")
    except MissingPlugin as error:
        print(f"measure_machine.py: {error}; copy plugins/machine_speed from the repository", file=sys.stderr)
        return 2
    began = time.monotonic()
    # Engines log their settings, which nobody reads here.
    importlib.import_module("logging").disable()
    speed = measure(lambda text: print(f"measuring {text}", flush=True), options.threads)
    path = write(speed)
    for text in _described(speed):
        print(text)
    print(f"written to {path} in {time.monotonic() - began:.1f} s")
    return 0


def _described(speed: object) -> list[str]:
    """Return the peaks as lines of text."""
    values = vars(speed)
    lines = [f"device    {values['device']}"]
    for threads, rates in values["products"].items():
        text = ", ".join(f"{dtype} {rate / 1e9:,.0f}" for dtype, rate in rates.items())
        lines.append(f"products  {text} billion operations per second{_threads(threads)}")
    for threads, rates in values["memory"].items():
        text = ", ".join(f"{rate / 1e9:.1f} ({int(size) / 2**20:g} MiB)" for size, rate in rates.items())
        lines.append(f"memory    {text} GB/s{_threads(threads)}")
    names = {"host_copy": "copies", "disk": "disk", "network": "network"}
    return [*lines, *(f"{title:<10}{values[name] / 1e9:.2f} GB/s" for name, title in names.items())]


def _threads(count: str) -> str:
    return f", {count} threads" if count != "0" else ""


if __name__ == "__main__":
    reexec_in_venv()
    sys.exit(main())

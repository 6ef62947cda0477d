"""Show, add or remove the rollout engines of a run with placement.elastic=true.

    python scripts/engines.py runs/grpo/latest show
    python scripts/engines.py runs/grpo/latest add 2
    python scripts/engines.py runs/grpo/latest remove 1

The command writes a request to the run folder, and waits until the run has carried it out. Exit code: 0 done, 1 the run
could not reach the number (the line names the reason), 2 invalid input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plugins.elastic.requests import FleetState

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT)]

from reexec_in_venv import reexec_in_venv  # noqa: E402

POLL_S = 0.5
WITHIN_S = 600.0
"""Timeout in seconds of a change, in which an engine may load a large model."""


def has_ended(run_dir: Path) -> bool:
    """True if the run has ended."""
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["status"] != "running"


def is_reached(state: FleetState, before: FleetState, target: int) -> bool:
    """True if the run has taken a request since `before` and has the requested number of engines."""
    # Before that, the number may be right by chance: an engine may be starting again.
    return state.requests > before.requests and (state.target, len(state.engines)) == (target, target)


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("action", choices=["show", "add", "remove"])
    parser.add_argument("count", type=int, nargs="?", default=1, help="number of engines (default: 1)")
    parser.add_argument("--within", type=float, default=WITHIN_S, help="timeout in seconds (default: %(default)g)")
    options = parser.parse_args(arguments)
    # After the parser, so that --help needs no packages.
    from plugins.elastic.requests import read_state, send_request

    try:
        before = read_state(options.run)
        ended = has_ended(options.run)
    except (OSError, ValueError) as error:
        print(
            f"{options.run} has no rollout engines that can change ({error}); start the run with "
            "placement.elastic=true, and wait until it has loaded its models",
            file=sys.stderr,
        )
        return 2
    if options.count < 1:
        print(f"{options.count} engines; give at least 1", file=sys.stderr)
        return 2
    if ended:
        print(f"{options.run}: the run has ended", file=sys.stderr)
        return 1
    state = before
    if options.action != "show":
        change = options.count if options.action == "add" else -options.count
        request = send_request(options.run, change)
        target = before.target + change
        # The run counts from its own target, which another command may have changed since.
        deadline = time.monotonic() + options.within
        reason = f"not reached within {options.within:g} s"
        while not is_reached(state, before, target) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            state = read_state(options.run)
            # A run that ends does not take the request, so the number would never be reached.
            if has_ended(options.run):
                reason = "the run has ended"
                break
            # Before the request is taken, the note is that of an earlier one.
            if state.note and state.requests > before.requests:
                reason = state.note
                break
        if not is_reached(state, before, target):
            # A request that the run has not taken must not change it later.
            request.unlink(missing_ok=True)
            print(f"{options.run}: {target} engines were requested: {reason}", file=sys.stderr)
            return 1
    print(f"{len(state.engines)} of {state.target} engines: {' '.join(state.engines)}")
    return 0


if __name__ == "__main__":
    reexec_in_venv()
    sys.exit(main())

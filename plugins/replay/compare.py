"""Comparison of two runs: `bash scripts/compare.sh RUN RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from plugins.replay.differences import (
    Difference,
    config_changes,
    differences,
    environment_changes,
    logged_steps,
    stored_batch,
)


def first_difference(first: Path, second: Path) -> Difference | None:
    """Return the first quantity that differs, in the first step that differs, or None if all common steps are equal."""
    for step in sorted({*logged_steps(first)} & {*logged_steps(second)}):
        for difference in differences(first, second, step):
            return difference
    return None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command_line = argparse.ArgumentParser(
        prog="compare.sh",
        description="Find the first step and quantity in which two runs differ: options, data order, prompt tokens, "
        "responses, rewards, advantages, metrics, weights.",
    )
    command_line.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="folder of a run, such as runs/a")
    return command_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two runs. Return the exit code: 0 all common steps are equal, 1 they differ, 2 a folder is no run."""
    runs = [run.expanduser().resolve() for run in parser().parse_args(arguments).runs]
    for run in runs:
        if not (run / "config.yaml").is_file():
            print(f"compare.sh: {run} is not the folder of a run: it has no config.yaml", file=sys.stderr)
            return 2
    first, second = runs
    _print_list("options", config_changes(first, second))
    _print_list("environment", environment_changes(first, second))
    common = sorted({*logged_steps(first)} & {*logged_steps(second)})
    if not common:
        print(f"compare: the runs have no common step ({first} has {len(logged_steps(first))})")
        return 1
    difference = first_difference(first, second)
    if difference is None:
        print(f"compare: all {len(common)} common steps are equal, {common[0]} to {common[-1]}")
        return 0
    before = [step for step in common if step < difference.step]
    print(f"compare: {len(before)} common steps before step {difference.step} are equal")
    print(f"compare: {difference}")
    if prompt := _prompt_of(first, difference):
        print(prompt)
    return 1


def _print_list(kind: str, lines: Sequence[str]) -> None:
    print(f"compare: {kind}: {'no difference' if not lines else ''}".rstrip())
    for line in lines:
        print(f"  {line}")


def _prompt_of(run: Path, difference: Difference) -> str:
    """Return the prompt number of the response that a difference names, as a line, or an empty text."""
    batch = stored_batch(run, difference.step)
    words = difference.detail.split()
    if batch is None or "response" not in words or "prompt_id" not in batch:
        return ""
    row = int(words[words.index("response") + 1].strip(","))
    return f"  response {row} belongs to prompt {int(batch['prompt_id'][row])} of the data"

"""The table and the verdict of scripts/prove.sh: reads the summary.json of its runs.

Usage: prove_table.py FOLDER [RECIPE], with one folder per run in it: seed-<n> for each seed, lr-0 for the control.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEAN_END = {"openrlhf_ppo": 0.75, "grpo": 0.8, "reinforce_pp": 0.75, "multi_turn": 0.7, "verl_ppo": 0.75}
BELOW = 0.03
"""What the lowest seed may lack of the mean that is asked for."""
MEAN_RISE = {"openrlhf_ppo": 0.4, "grpo": 0.4, "reinforce_pp": 0.4, "multi_turn": 0.25, "verl_ppo": 0.4}
"""Exact match on held-out examples, or games that are won, sampled at temperature 1: shares between 0 and 1."""
STILL = 0.002
"""How far a score may move with learning rate 0: 4 of 2,048 examples. Both evaluations draw the same random numbers,
so only rounding can turn an answer over."""


@dataclass(frozen=True)
class Run:
    """What one run says of itself; scores are None when it has none."""

    name: str
    status: str
    start: float | None
    end: float | None
    start_greedy: float | None
    end_greedy: float | None
    training_s: float | None
    peak_gib: float | None

    @property
    def whole(self) -> bool:
        scores = (self.start, self.end, self.start_greedy, self.end_greedy)
        return self.status == "finished" and None not in scores

    @property
    def rise(self) -> float:
        return (self.end or 0.0) - (self.start or 0.0)


def read_run(folder: Path) -> Run:
    """Read a run folder; one without a summary is a run that failed."""
    path = folder / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"status": "no summary.json"}
    score: dict[str, float | None] = summary.get("score") or {}
    seconds: dict[str, float | None] = summary.get("seconds") or {}
    peak = summary.get("peak_memory_bytes")
    return Run(
        name=folder.name,
        status=summary["status"],
        start=score.get("start"),
        end=score.get("end"),
        start_greedy=score.get("start_greedy"),
        end_greedy=score.get("end_greedy"),
        training_s=seconds.get("training"),
        peak_gib=peak / 2**30 if peak else None,
    )


def table(runs: list[Run]) -> str:
    """One line per run."""

    def show(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    head = ("run", "status", "start", "end", "rise", "greedy start", "greedy end", "training s", "peak GiB")
    rows: list[tuple[str, ...]] = [head]
    for run in runs:
        scores = [show(value, 3) for value in (run.start, run.end, run.rise if run.whole else None)]
        greedy = [show(value, 3) for value in (run.start_greedy, run.end_greedy)]
        rows.append((run.name, run.status, *scores, *greedy, show(run.training_s, 0), show(run.peak_gib, 1)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def verdicts(runs: list[Run], recipe: str) -> list[tuple[bool, str]]:
    """Each bar of a recipe, with whether it is reached."""
    seeds = [run for run in runs if run.name.startswith("seed-")]
    controls = [run for run in runs if run.name == "lr-0"]
    if not seeds or not controls or not all(run.whole for run in runs):
        return [(False, "every run finished, with its scores")]
    mean_end = sum(run.end or 0.0 for run in seeds) / len(seeds)
    mean_rise = sum(run.rise for run in seeds) / len(seeds)
    worst = min(run.end or 0.0 for run in seeds)
    control, asked = controls[0], MEAN_END[recipe]
    lowest = round(asked - BELOW, 3)
    greedy_rise = (control.end_greedy or 0.0) - (control.start_greedy or 0.0)
    return [
        (mean_end >= asked, f"mean score at the end {mean_end:.3f}, at least {asked}"),
        (worst >= lowest, f"the lowest of them {worst:.3f}, at least {lowest}"),
        (mean_rise >= MEAN_RISE[recipe], f"mean rise {mean_rise:.3f}, at least {MEAN_RISE[recipe]}"),
        (abs(control.rise) <= STILL, f"with learning rate 0 the score moves by {control.rise:+.4f}, at most {STILL}"),
        (abs(greedy_rise) <= STILL, f"with learning rate 0 the greedy score moves by {greedy_rise:+.4f}, the same"),
    ]


def main() -> int:
    """Print the table and the bars; 0 when all are reached."""
    recipe = sys.argv[2] if len(sys.argv) > 2 else "openrlhf_ppo"
    if recipe not in MEAN_END:
        print(
            f"prove_table.py: there is no bar for {recipe!r}; set it to one of {', '.join(MEAN_END)}", file=sys.stderr
        )
        return 2
    folders = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    runs = [read_run(folder) for folder in folders]
    print(table(runs))
    reached = verdicts(runs, recipe)
    for passed, text in reached:
        print("pass" if passed else "FAIL", text)
    return 0 if all(passed for passed, _ in reached) else 1


if __name__ == "__main__":
    sys.exit(main())

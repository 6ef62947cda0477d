"""Print the table and the verdict of scripts/prove.sh from the summary.json of its runs.

Usage: prove_table.py FOLDER [RECIPE], with one folder per run in it: seed-<n> for each seed, lr-0 for the control.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEAN_END = {"openrlhf_ppo": 0.75, "grpo": 0.8, "reinforce_pp": 0.75, "multi_turn": 0.7, "verl_ppo": 0.75}
"""Recipe -> minimum of the final score, averaged over the seeds.

Scores are exact matches on held-out examples, or won games, sampled at temperature 1: shares between 0 and 1.
"""
BELOW = 0.03
"""Maximum amount by which the final score of a single seed may be below MEAN_END."""
MEAN_RISE = {"openrlhf_ppo": 0.4, "grpo": 0.4, "reinforce_pp": 0.4, "multi_turn": 0.25, "verl_ppo": 0.4}
"""Recipe -> minimum of the improvement of the score, averaged over the seeds."""
STILL = 0.002
"""Maximum change of a score with learning rate 0: 4 of 2,048 examples.

Both evaluations use the same random numbers, so that only rounding can change a response.
"""


@dataclass(frozen=True)
class Run:
    """Summary of one run. Scores are None if the run has none."""

    name: str
    status: str
    start: float | None
    end: float | None
    start_greedy: float | None
    end_greedy: float | None
    training_s: float | None
    peak_gib: float | None

    @property
    def is_complete(self) -> bool:
        """True if the run has finished and has all scores."""
        scores = (self.start, self.end, self.start_greedy, self.end_greedy)
        return self.status == "finished" and None not in scores

    @property
    def rise(self) -> float:
        """Improvement of the sampled score."""
        return (self.end or 0.0) - (self.start or 0.0)


def read_run(folder: Path) -> Run:
    """Read a run folder. A folder without a summary is a failed run."""
    path = folder / "summary.json"
    summary: dict[str, Any] = {"status": "no summary.json"}
    if path.is_file():
        summary = json.loads(path.read_text())
    score: dict[str, float | None] = summary.get("score") or {}
    seconds: dict[str, float | None] = summary.get("seconds") or {}
    peak_gib = None
    if summary.get("peak_memory_bytes"):
        peak_gib = summary["peak_memory_bytes"] / 2**30
    return Run(
        name=folder.name,
        status=summary["status"],
        start=score.get("start"),
        end=score.get("end"),
        start_greedy=score.get("start_greedy"),
        end_greedy=score.get("end_greedy"),
        training_s=seconds.get("training"),
        peak_gib=peak_gib,
    )


def table(runs: list[Run]) -> str:
    """Return the table as text, one line per run."""

    def show(value: float | None, digits: int) -> str:
        if value is None:
            return "-"
        return f"{value:.{digits}f}"

    head = ("run", "status", "start", "end", "rise", "greedy start", "greedy end", "training s", "peak GiB")
    rows: list[tuple[str, ...]] = [head]
    for run in runs:
        rise = None
        if run.is_complete:
            rise = run.rise
        scores = [show(value, 3) for value in (run.start, run.end, rise)]
        greedy = [show(value, 3) for value in (run.start_greedy, run.end_greedy)]
        rows.append((run.name, run.status, *scores, *greedy, show(run.training_s, 0), show(run.peak_gib, 1)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def verdicts(runs: list[Run], recipe: str) -> list[tuple[bool, str]]:
    """Return (is reached, text) for each threshold of a recipe."""
    seeds = [run for run in runs if run.name.startswith("seed-")]
    controls = [run for run in runs if run.name == "lr-0"]
    # A missing run could hide the worst seed, so there is no verdict without all of them.
    if not seeds or not controls or not all(run.is_complete for run in runs):
        return [(False, "all runs have finished and have their scores")]
    mean_end = sum(run.end or 0.0 for run in seeds) / len(seeds)
    mean_rise = sum(run.rise for run in seeds) / len(seeds)
    worst = min(run.end or 0.0 for run in seeds)
    control = controls[0]
    least_mean = MEAN_END[recipe]
    # Rounded, because 0.8 - 0.03 is not exactly 0.77.
    least = round(least_mean - BELOW, 3)
    greedy_rise = (control.end_greedy or 0.0) - (control.start_greedy or 0.0)
    return [
        (mean_end >= least_mean, f"mean final score {mean_end:.3f}, at least {least_mean}"),
        (worst >= least, f"lowest final score {worst:.3f}, at least {least}"),
        (mean_rise >= MEAN_RISE[recipe], f"mean improvement {mean_rise:.3f}, at least {MEAN_RISE[recipe]}"),
        (abs(control.rise) <= STILL, f"with learning rate 0 the score changes by {control.rise:+.4f}, at most {STILL}"),
        (
            abs(greedy_rise) <= STILL,
            f"with learning rate 0 the greedy score changes by {greedy_rise:+.4f}, at most {STILL}",
        ),
    ]


def main() -> int:
    """Print the table and the thresholds. Return 0 if all are reached, 1 if not, 2 for an unknown recipe."""
    recipe = (sys.argv[2:] or ["openrlhf_ppo"])[0]
    if recipe not in MEAN_END:
        print(
            f"prove_table.py: there is no threshold for {recipe!r}; choose one of {', '.join(MEAN_END)}",
            file=sys.stderr,
        )
        return 2
    folders = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    runs = [read_run(folder) for folder in folders]
    print(table(runs))
    reached = verdicts(runs, recipe)
    for passed, text in reached:
        print("pass" if passed else "FAIL", text)
    return int(not all(passed for passed, _ in reached))


if __name__ == "__main__":
    sys.exit(main())

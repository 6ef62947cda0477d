"""Measure the speed-up of asynchronous training with a slow environment, and its effect on the score.

    python scripts/bench_async.py           grpo on its demonstration, 2 epochs per step, 3 seeds of each kind
    python scripts/bench_async.py --wait 1.0 --steps 16 --seeds 1

The task is sorting, in an environment that takes `--wait` seconds per response. The default makes generation about as
long as training. All episodes of a batch wait at the same time in both kinds of runs, so that the gain comes from
training in the meantime. "ideal" is (g + t) / max(g, t) of the synchronous runs, with g seconds of generation per step
and t seconds of everything else. Seconds are medians of the wall time from the end of one step to the next. The runs do
not overlap.

Responses sampled with older weights are corrected by TIS. Scores are those of 2,048 held-out prompts at the end. Exit
code 1: the gain is below 0.75 of the ideal, or the mean score of the asynchronous runs is lower by more than twice its
standard error over the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.75
"""Minimum share of the ideal gain."""
HELDOUT = 2048
SKIPPED = 3
"""Number of warm-up steps, which are not measured."""
AGENT = """
import asyncio, os
from agents import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        await asyncio.sleep(float(os.environ["BENCH_WAIT_S"]))
        reward = float(states["action_text"] == states["label"])
        return {"rewards": reward, "scores": reward, "environment_feedback": "", "done": True}
"""


def run(folder: Path, agent: Path, steps: int, wait: float, more: list[str]) -> tuple[list[dict[str, Any]], float]:
    """Run grpo once. Return the metrics of its steps, and its final score."""
    command = [sys.executable, "-m", "recipes.grpo.main", f"run_dir={folder}", f"agent.func_path={agent}"]
    # Not colocated: generation and training overlap only on separate devices.
    command += ["placement.colocate=false", "train.epochs=2", f"data.max_samples={64 * steps}", *more]
    environment = os.environ | {"BENCH_WAIT_S": str(wait), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    score = json.loads((folder / "summary.json").read_text())["score"]["end"]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], score


def step_seconds(rows: list[dict[str, Any]]) -> list[float]:
    """Return the wall time of each step after the warm-up."""
    # The end of the last warm-up step is the start of the first measured one.
    times = [row["time"] for row in rows[SKIPPED - 1 :]]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def loss_of_score(synchronous: list[float], asynchronous: list[float]) -> tuple[float, float]:
    """Return the difference of the mean scores, and its standard error over seeds or held-out prompts, if larger."""
    lost = statistics.mean(synchronous) - statistics.mean(asynchronous)
    square = 0.0
    for scores in (synchronous, asynchronous):
        mean = statistics.mean(scores)
        count = len(scores)
        among_seeds = 0.0
        if count > 1:
            among_seeds = statistics.variance(scores)
        # Few seeds underestimate the variance; that of sampling the held-out prompts is a lower bound.
        square += max(among_seeds, mean * (1 - mean) / HELDOUT) / count
    return lost, math.sqrt(square)


def main() -> int:
    """Run all pairs, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", type=float, default=0.6, help="seconds of the environment per response")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    kinds = {"synchronous": [], "asynchronous": ["--async_train", "algorithm.correction=tis"]}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    scores: dict[str, list[float]] = {kind: [] for kind in kinds}
    generating: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        agent = Path(scratch) / "agent.py"
        agent.write_text(AGENT)
        for seed in options.seeds:
            for kind, more in kinds.items():
                folder = Path(scratch) / f"{kind}-{seed}"
                rows, score = run(folder, agent, options.steps, options.wait, [f"seed={seed}", *more])
                print(f"{kind}, seed {seed}: score {score:.3f}", flush=True)
                seconds[kind] += step_seconds(rows)
                scores[kind].append(score)
                # In an asynchronous run generation overlaps with training, so its time is no part of the step.
                if kind == "synchronous":
                    generating += [row["timing_s/generate"] for row in rows[SKIPPED:]]
    middle = {kind: statistics.median(times) for kind, times in seconds.items()}
    generation = statistics.median(generating)
    training = middle["synchronous"] - generation
    ideal = (generation + training) / max(generation, training)
    gain = middle["synchronous"] / middle["asynchronous"]
    print(f"synchronous: {generation:.2f} s generating, {training:.2f} s all else; ideal gain {ideal:.2f}")
    print("| run | seconds per step, median | responses per second | scores | mean |\n|---|---|---|---|---|")
    for kind, value in middle.items():
        ended = ", ".join(f"{score:.3f}" for score in scores[kind])
        print(f"| {kind} | {value:.2f} | {512 / value:.0f} | {ended} | {statistics.mean(scores[kind]):.3f} |")
    lost, error = loss_of_score(scores["synchronous"], scores["asynchronous"])
    print(f"gain {gain:.2f}, {gain / ideal:.2f} of the ideal; score lower by {lost:.3f}, standard error {error:.3f}")
    return int(gain / ideal < BAR or lost > 2 * error)


if __name__ == "__main__":
    sys.exit(main())

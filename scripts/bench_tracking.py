"""Measure the cost of checkpoints and tracking in a default run of openrlhf_ppo, with blocks of steps in one run.

    python scripts/bench_tracking.py                              16 blocks of the default size
    python scripts/bench_tracking.py --blocks 8 checkpoint.every=5     fewer and shorter ones

After a warm-up block, every second block of `checkpoint.every` steps has checkpoints and tracking as in the recipe: the
metrics, the rollouts and the summary of each step, and a checkpoint at the end of the block. The other blocks have none
of them. A block is timed from the end of the previous one, so that work between two steps is included. Neighbouring
blocks are compared, so that a change of the machine's speed affects both. All blocks have console output and events of
calls. The driver is another process, and the time of events is measured there.

The run folder is created in --folder, whose disk is measured, and removed at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The workers import this file too, as the module bench_tracking.
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from components.batch import Batch  # noqa: E402 (the project may not be installed)
from core import Role  # noqa: E402
from recipes.openrlhf_ppo.config import PPOConfig  # noqa: E402
from recipes.openrlhf_ppo.data import check_models  # noqa: E402
from recipes.openrlhf_ppo.layout import resolved  # noqa: E402
from recipes.openrlhf_ppo.main import build_job, read_config  # noqa: E402
from recipes.openrlhf_ppo.trainer import PPOTrainer  # noqa: E402
from training.options.config import CommandLine  # noqa: E402
from training.options.schema import ConfigError  # noqa: E402
from training.tracking import EventLog, Tracker  # noqa: E402
from training.tracking.tracker import ROLLOUTS  # noqa: E402

BLOCKS_FILE = "blocks.json"
OURS = (
    *("run_dir", "resume", "data.max_samples", "data.epochs"),
    *("evaluation.every", "checkpoint.path", "checkpoint.export_path"),
)
"""Options that the measurement sets itself, or that would write elsewhere."""


@dataclass(frozen=True)
class Block:
    """Durations of a block of steps, in seconds."""

    tracked: bool
    """True if the block had checkpoints and tracking."""
    began: float
    """Start time in seconds since the epoch."""
    seconds: float
    checkpoint: float
    """Time in `save_when_due`, included in `seconds`."""
    tracking: float
    """Time in the tracker, included in `seconds`."""


class SwitchedTracker(Tracker):
    """Wrapper of the recipe's tracker that can be switched off and measures its time."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.on = True
        self.seconds = 0.0

    def log(self, step: int, metrics: Mapping[str, Any], **options: Any) -> None:
        self._do(lambda: self.tracker.log(step, metrics, **options))

    def keep_tokenizer(self, tokenizer: Any) -> None:
        self._do(lambda: self.tracker.keep_tokenizer(tokenizer))

    def samples(self, step: int, rows: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self._do(lambda: self.tracker.samples(step, rows))

    def rollouts(self, step: int, batch: Batch, name: str = ROLLOUTS) -> None:
        self._do(lambda: self.tracker.rollouts(step, batch, name))

    def update_summary(self, **fields: Any) -> None:
        self._do(lambda: self.tracker.update_summary(**fields))

    def state_dict(self) -> dict[str, Any]:
        return self.tracker.state_dict()

    def close(self) -> None:
        self.tracker.close()

    def _do(self, act: Callable[[], None]) -> None:
        if self.on:
            began = time.perf_counter()
            act()
            self.seconds += time.perf_counter() - began


class TimedSaves:
    """`RunCheckpoints.save_when_due`, called only in blocks with tracking, with its time."""

    def __init__(self, save: Callable[[bool], None], tracker: SwitchedTracker) -> None:
        self._save = save
        self._tracker = tracker
        self.seconds = 0.0

    def __call__(self, is_best: bool = False) -> None:
        if self._tracker.on:
            began = time.perf_counter()
            self._save(is_best)
            self.seconds += time.perf_counter() - began


class BenchTrainer(PPOTrainer):
    """Trainer that writes the durations of all blocks but the first into the run folder."""

    def fit(self) -> None:
        run = self.policy_run
        tracker = SwitchedTracker(run.tracker)
        saves = TimedSaves(run.checkpoints.save_when_due, tracker)
        run.tracker = tracker
        run.checkpoints.save_when_due = saves
        blocks: list[Block] = []
        all_rollouts = run.queue

        def timed(*arguments: Any, **named: Any) -> Iterator[Batch]:
            start = time.time()
            clock = time.perf_counter()
            for rollouts in all_rollouts(*arguments, **named):
                yield rollouts  # continues after the step
                if run.step % self.config.checkpoint.every == 0:
                    now = time.perf_counter()
                    blocks.append(Block(tracker.on, start, now - clock, saves.seconds, tracker.seconds))
                    saves.seconds = tracker.seconds = 0.0
                    start = time.time()
                    clock = now
                    tracker.on = not tracker.on
                if run.steps - run.step == 1:
                    break  # only the last step of a run has an evaluation

        run.queue = timed
        super().fit()
        text = json.dumps([asdict(block) for block in blocks[1:]])
        Path(self.config.run_dir, BLOCKS_FILE).write_text(text, encoding="utf-8")


class TimedEvents:
    """Observer that writes events.jsonl as the recipe does, and measures each write."""

    def __init__(self, path: Path) -> None:
        self._log = EventLog(path)
        self.took: list[tuple[float, float]] = []
        """(time since the epoch, duration) of each event, in seconds."""

    def __call__(self, event: Any) -> None:
        now = time.time()
        began = time.perf_counter()
        self._log(event)
        self.took.append((now, time.perf_counter() - began))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (lower quartile, median, upper quartile). A single value is all three."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def report(blocks: Sequence[Block], steps: int, events: Sequence[tuple[float, float]]) -> str:
    """Return the report on blocks of `steps` steps. `events` has (time, duration) of each event."""
    lines = []
    for tracked, name in ((True, "with"), (False, "without")):
        low, middle, high = quartiles([block.seconds for block in blocks if block.tracked == tracked])
        spread = f"quartiles {low:.3f} .. {high:.3f}"
        lines.append(f"{name:8} {middle:7.3f} s a block ({spread}), {middle / steps:.4f} s a step")
    ratios = []
    # Neighbours, because the speed of a machine changes during a run.
    for pair in itertools.pairwise(blocks):
        tracked_block, plain_block = sorted(pair, key=lambda block: not block.tracked)
        ratios.append(tracked_block.seconds / plain_block.seconds)
    low, middle, high = quartiles(ratios)
    lines.append(f"ratio    {middle:7.4f} (quartiles {low:.4f} .. {high:.4f}) over {len(ratios)} pairs of neighbours")
    tracked_blocks = [block for block in blocks if block.tracked]
    total = sum(block.seconds for block in tracked_blocks)
    count = len(tracked_blocks)
    parts = [
        ("checkpoints", sum(block.checkpoint for block in tracked_blocks), count, "each"),
        ("tracking", sum(block.tracking for block in tracked_blocks), count * steps, "a step"),
    ]
    for name, seconds, number, each in parts:
        lines.append(f"{name}: {seconds / total:.2%} of the blocks with, {1000 * seconds / number:.2f} ms {each}")
    began = blocks[0].began
    elapsed = sum(block.seconds for block in blocks)
    costs = [cost for when, cost in events if began <= when <= began + elapsed]
    lines.append(
        f"events, in the driver: {sum(costs) / elapsed:.3%} of all blocks' time, {len(costs)} of "
        f"{1000 * sum(costs) / max(1, len(costs)):.3f} ms each"
    )
    return "\n".join(lines)


def measured_config(blocks: int, options: list[str], run_dir: str) -> PPOConfig:
    """Return the configuration of the recipe, with the number of prompts that the blocks need.

    Raises:
        ConfigError: an option is set by the measurement itself.
    """
    taken = [name for name in OURS if name in CommandLine(PPOConfig, options).named]
    if taken:
        raise ConfigError(f"{', '.join(taken)}: set by the measurement; leave it out")
    config = resolved(read_config(options))
    if config.checkpoint.every < 1:
        raise ConfigError(
            f"checkpoint.every={config.checkpoint.every}; set the steps of a block, which ends with a checkpoint"
        )
    # A warm-up block, and one last step, which is not measured.
    prompts = ((blocks + 1) * config.checkpoint.every + 1) * config.prompts_per_step
    return replace(
        config,
        run_dir=run_dir,
        resume="none",
        data=replace(config.data, max_samples=prompts, epochs=1),
        # An evaluation would make one of the blocks longer than its neighbour.
        evaluation=replace(config.evaluation, every=-1),
    )


def measure(blocks: int, options: list[str], folder: Path) -> int:
    """Run the blocks and print the report. Return the exit code."""
    try:
        config = measured_config(blocks, options, str(folder))
        check_models(config)
        job = build_job(config)
    except ValueError as error:
        print(f"bench_tracking: {error}", file=sys.stderr)
        return 2
    job.roles[Role.TRAINER].entrypoint = "bench_tracking:BenchTrainer"
    job.config = replace(config, model=config.model.prepared(folder))
    events = TimedEvents(folder / "events.jsonl")
    result = job.submit("bench_tracking", log_dir=folder / "logs", observers=[events])
    if result.status != "finished":
        print(f"{result.output}\nbench_tracking: {result.status}: {result.error}", file=sys.stderr)
        return result.exit_code
    measured = [Block(**entry) for entry in json.loads((folder / BLOCKS_FILE).read_text(encoding="utf-8"))]
    if len(measured) < 2:
        print(
            f"bench_tracking: the prompts suffice for {len(measured)} blocks, and two are needed; raise --blocks",
            file=sys.stderr,
        )
        return 2
    print(f"{len(measured)} blocks of {config.checkpoint.every} steps, seed {config.seed}, on {folder.parent}")
    print(report(measured, config.checkpoint.every, events.took))
    return 0


def main() -> int:
    """Return the exit code: 0 measured, 1 the run failed, 2 invalid input, 130 stopped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=16,
        help="number of blocks, half of them with checkpoints and tracking (default 16)",
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of the run (default 42)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="folder in which the run folder is created")
    known, options = parser.parse_known_args()
    if known.blocks < 2:
        parser.error(f"--blocks {known.blocks}: set at least 2, one with tracking and one without")
    known.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_tracking-", dir=known.folder.resolve()) as run_dir:
        return measure(known.blocks, [*options, f"seed={known.seed}"], Path(run_dir))


if __name__ == "__main__":
    sys.exit(main())

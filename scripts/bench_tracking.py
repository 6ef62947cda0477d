"""What checkpoints and tracking cost a default run of openrlhf_ppo: blocks of steps with and without them, in one run.

    python scripts/bench_tracking.py                              16 blocks of the recipe's own size
    python scripts/bench_tracking.py --blocks 8 checkpoint.every=5     fewer and shorter ones

After a block to warm up, every second block of `checkpoint.every` steps has all that the recipe ships: a line of
metrics, the rollouts and the summary at each step, and a checkpoint at the block's end. The others have none of it. A
block is timed from the end of the one before, so what is done between two steps counts too. Neighbours are compared, so
that a machine that slows down changes both. Console lines and the calls' events are in all blocks; the time that events
take in the driver, which is another process, is measured there.

The run folder lies in --folder, on whose disk checkpoints are measured, and is removed at the end.
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
# The workers import this file too, by its own name.
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
"""Options of the recipe that the measurement sets itself, or that would write elsewhere."""


@dataclass(frozen=True)
class Block:
    """Some steps in a row, in seconds."""

    tracked: bool
    """Whether it had checkpoints and tracking."""
    began: float
    """Since the epoch."""
    seconds: float
    checkpoint: float
    """Of these, in `save_when_due`."""
    tracking: float
    """Of these, in the tracker."""


class SwitchedTracker(Tracker):
    """The recipe's tracker, which can be off, and counts the seconds that it takes."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.on = True
        self.seconds = 0.0

    def log(self, step: int, metrics: Mapping[str, Any], **told: Any) -> None:
        self._do(lambda: self.tracker.log(step, metrics, **told))

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
    """`RunCheckpoints.save_when_due` in the blocks that have tracking, and the seconds that it takes."""

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
    """Trains in blocks, and leaves what they took in the run folder. The first block is not among them."""

    def fit(self) -> None:
        run = self.policy_run
        tracker = SwitchedTracker(run.tracker)
        saves = TimedSaves(run.checkpoints.save_when_due, tracker)
        run.tracker = tracker
        run.checkpoints.save_when_due = saves
        blocks: list[Block] = []
        all_rollouts = run.queue

        def timed(*given: Any, **named: Any) -> Iterator[Batch]:
            start = time.time()
            clock = time.perf_counter()
            for rollouts in all_rollouts(*given, **named):
                yield rollouts  # what follows is done once the step is over
                if run.step % self.config.checkpoint.every == 0:
                    now = time.perf_counter()
                    blocks.append(Block(tracker.on, start, now - clock, saves.seconds, tracker.seconds))
                    saves.seconds = tracker.seconds = 0.0
                    start = time.time()
                    clock = now
                    tracker.on = not tracker.on
                if run.steps - run.step == 1:
                    break  # the last step of a run has an evaluation, which no other has

        run.queue = timed
        super().fit()
        text = json.dumps([asdict(block) for block in blocks[1:]])
        Path(self.config.run_dir, BLOCKS_FILE).write_text(text, encoding="utf-8")


class TimedEvents:
    """events.jsonl as the recipe writes it, with what each event took."""

    def __init__(self, path: Path) -> None:
        self._log = EventLog(path)
        self.took: list[tuple[float, float]] = []
        """When, in seconds since the epoch, and how many seconds."""

    def __call__(self, event: Any) -> None:
        now, began = time.time(), time.perf_counter()
        self._log(event)
        self.took.append((now, time.perf_counter() - began))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper one; of a single value that value."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def report(blocks: Sequence[Block], steps: int, events: Sequence[tuple[float, float]]) -> str:
    """What the blocks of so many steps show. `events`: when each was written, and the seconds it took."""
    lines = []
    for tracked, name in ((True, "with"), (False, "without")):
        low, middle, high = quartiles([block.seconds for block in blocks if block.tracked == tracked])
        spread = f"quartiles {low:.3f} .. {high:.3f}"
        lines.append(f"{name:8} {middle:7.3f} s a block ({spread}), {middle / steps:.4f} s a step")
    ratios = [
        (one.seconds / other.seconds) if one.tracked else (other.seconds / one.seconds)
        for one, other in itertools.pairwise(blocks)
    ]
    low, middle, high = quartiles(ratios)
    lines.append(f"ratio    {middle:7.4f} (quartiles {low:.4f} .. {high:.4f}) over {len(ratios)} pairs of neighbours")
    tracked_blocks = [block for block in blocks if block.tracked]
    total, count = sum(block.seconds for block in tracked_blocks), len(tracked_blocks)
    parts = [
        ("checkpoints", sum(block.checkpoint for block in tracked_blocks), count, "each"),
        ("tracking", sum(block.tracking for block in tracked_blocks), count * steps, "a step"),
    ]
    for name, seconds, number, each in parts:
        lines.append(f"{name}: {seconds / total:.2%} of the blocks with, {1000 * seconds / number:.2f} ms {each}")
    began, elapsed = blocks[0].began, sum(block.seconds for block in blocks)
    costs = [cost for when, cost in events if began <= when <= began + elapsed]
    lines.append(
        f"events, in the driver: {sum(costs) / elapsed:.3%} of all blocks' time, {len(costs)} of "
        f"{1000 * sum(costs) / max(1, len(costs)):.3f} ms each"
    )
    return "\n".join(lines)


def measured_config(blocks: int, options: list[str], run_dir: str) -> PPOConfig:
    """The recipe's configuration, with as many prompts as the blocks need.

    Raises:
        ConfigError: an option is one that the measurement sets itself.
    """
    taken = [name for name in OURS if name in CommandLine(PPOConfig, options).named]
    if taken:
        raise ConfigError(f"{', '.join(taken)}: set by the measurement; leave it out")
    config = resolved(read_config(options))
    if config.checkpoint.every < 1:
        raise ConfigError(
            f"checkpoint.every={config.checkpoint.every}; set the steps of a block, which ends with a checkpoint"
        )
    # One block to warm up, and one step that is left out because it would be the last.
    prompts = ((blocks + 1) * config.checkpoint.every + 1) * config.prompts_per_step
    return replace(
        config,
        run_dir=run_dir,
        resume="none",
        data=replace(config.data, max_samples=prompts, epochs=1),
        evaluation=replace(config.evaluation, every=-1),
    )


def measure(blocks: int, options: list[str], folder: Path) -> int:
    """Run the blocks and print what they show; returns the exit code."""
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
    found = [Block(**entry) for entry in json.loads((folder / BLOCKS_FILE).read_text(encoding="utf-8"))]
    if len(found) < 2:
        print(f"bench_tracking: the prompts are enough for {len(found)} blocks; two are needed", file=sys.stderr)
        return 2
    print(f"{len(found)} blocks of {config.checkpoint.every} steps, seed {config.seed}, on {folder.parent}")
    print(report(found, config.checkpoint.every, events.took))
    return 0


def main() -> int:
    """Read the command line; 0 measured, 1 the run failed, 2 bad input, 130 stopped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--blocks", type=int, default=16, help="how many, half of them with (default 16)")
    parser.add_argument("--seed", type=int, default=42, help="of the run (default 42)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="where the run folder lies for the time")
    known, options = parser.parse_known_args()
    if known.blocks < 2:
        parser.error(f"--blocks {known.blocks}: give at least 2, one with and one without")
    known.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_tracking-", dir=known.folder.resolve()) as run_dir:
        return measure(known.blocks, [*options, f"seed={known.seed}"], Path(run_dir))


if __name__ == "__main__":
    sys.exit(main())

"""Replay of one training step: `bash scripts/replay.sh RUN --step N`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.process.import_path import with_our_path
from components.registry import load
from plugins.replay.differences import (
    UNRELATED,
    differences,
    environment_changes,
    logged_steps,
    metrics_of,
)
from training.run.checkpoint import step_of
from training.tracking.serialization import flat, json_object
from training.tracking.tracker import ROLLOUTS

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.1
STOP_S = 600
"""Maximum seconds between the request to stop and the end of the run."""
QUIET = {
    "log.wandb": "false",
    "log.wandb_key": "null",
    "log.tensorboard": "false",
    "log.tensorboard_dir": "null",
    "log.metrics_port": "null",
    "evaluation.at_start": "false",
    "evaluation.every": "-1",
    "checkpoint.every": "-1",
    "checkpoint.path": "null",
    "checkpoint.export_path": "null",
}
"""Options of a replay, as far as a recipe has them. It publishes nothing, evaluates nothing and keeps no checkpoint."""
OF_START = ("run_dir", "resume", "dry_run", "print_config", "assume_devices", "rehearse")
"""Options of the recorded start that do not apply to a replay."""


class ReplayError(ValueError):
    """Raised if a step cannot be replayed. The message is one line that says what to do."""


@dataclass(frozen=True)
class Replay:
    """A step to replay, and the folder for it."""

    run: Path
    """Folder of the recorded run."""
    step: int
    folder: Path
    """Folder of the replay. It becomes the run folder of the repeated steps."""
    changes: Sequence[str] = ()
    """Options to change, as `name=value`."""
    regenerates: bool = False
    """True to generate the rollouts again instead of reading the stored ones."""

    @property
    def recipe(self) -> str:
        """Name of the recipe of the run."""
        return str(json_object(self.run / "summary.json").get("recipe", ""))

    def check(self) -> None:
        """Check that the records that a replay needs are there.

        Raises:
            ReplayError: they are not, or the folder of the replay exists.
        """
        if not (self.run / "config.yaml").is_file() or not self.recipe:
            raise ReplayError(f"{self.run} is not the folder of a run: it lacks config.yaml or summary.json")
        if not (ROOT / "recipes" / self.recipe / "main.py").is_file():
            raise ReplayError(f"the run is of recipe {self.recipe}, and there is no recipes/{self.recipe}/main.py")
        steps = logged_steps(self.run)
        if self.step not in steps:
            known = f"it has logged the steps {steps[0]} to {steps[-1]}" if steps else "it has logged no step"
            raise ReplayError(f"{self.run} has no step {self.step}; {known}")
        if self.folder.exists():
            raise ReplayError(f"{self.folder} exists already; remove it, or set --out to another folder")

    def checkpoint(self) -> Path | None:
        """Return the newest intact checkpoint before the step, or None to start from the initial model."""
        config = yaml.safe_load((self.run / "config.yaml").read_text(encoding="utf-8"))
        folder = Path(config["checkpoint"]["path"] or self.run / "checkpoints").expanduser()
        steps = sorted((path for path in folder.glob("step_*") if path.is_dir()), key=step_of, reverse=True)
        for path in steps:
            # The folder of an export has no state, and a damaged one cannot be resumed from.
            if step_of(path) < self.step:
                try:
                    return load("checkpoint reader", "find")(str(path), folder)
                except ValueError as error:
                    print(f"replay: {error}", file=sys.stderr)
        return None

    def command(self, checkpoint: Path | None) -> list[str]:
        """Return the command that repeats the steps."""
        config = yaml.safe_load((self.run / "config.yaml").read_text(encoding="utf-8"))
        recorded = flat(config)
        options = {name: value for name, value in QUIET.items() if name in recorded}
        options |= {"run_dir": str(self.folder), "resume": str(checkpoint or "none")}
        if "rollout.replay_from" in recorded:
            options["rollout.replay_from"] = "" if self.regenerates else str(self.run)
        changed = [change.partition("=") for change in self.changes]
        options |= {name: value for name, _, value in changed}
        arguments = [f"{name}={value}" for name, value in options.items()]
        return [
            sys.executable,
            "-P",
            str(ROOT / "scripts" / "early_stop.py"),
            f"recipes.{self.recipe}.main",
            *arguments,
        ]

    def write_config(self) -> Path:
        """Write the recorded configuration, without options of the recorded start. Return the path of the file."""
        config = yaml.safe_load((self.run / "config.yaml").read_text(encoding="utf-8"))
        for name in OF_START:
            config.pop(name, None)
        path = self.folder.with_name(f"{self.folder.name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
        return path

    @property
    def log(self) -> Path:
        """File with the output of the repeated run."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def environment(self) -> dict[str, str]:
        """Return the environment of the repeated run, with the number of threads of the recorded one.

        Sums are computed in another order with another number of threads, so the last bits would differ.
        """
        environment = with_our_path(os.environ)
        threads = json_object(self.run / "environment.json").get("omp_num_threads")
        environment.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = threads
        return environment

    def execute(self) -> int:
        """Repeat the steps from the checkpoint to the step of the replay. Return the first repeated step.

        Raises:
            ReplayError: the run failed before it reached the step.
        """
        self.check()
        checkpoint = self.checkpoint()
        start = f"the checkpoint {checkpoint}" if checkpoint else "the initial model"
        print(f"replay: repeats step {self.step} of {self.run} from {start}", flush=True)
        config = self.write_config()
        log = self.log.open("wb")
        # A session of its own, so that Ctrl-C reaches the run once, from here.
        process = subprocess.Popen(
            [*self.command(checkpoint), f"--config={config}"],
            env=self.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        try:
            while process.poll() is None and not self.is_complete():
                time.sleep(POLL_S)
        finally:
            _stop(process)
            config.unlink()
        if not self.is_complete():
            # A refused option is explained in the last line.
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            raise ReplayError(
                f"the run ended with exit code {process.returncode} before step {self.step} ({last}); its output is in "
                f"{self.log}"
            )
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        return 1 if checkpoint is None else step_of(checkpoint) + 1

    def is_complete(self) -> bool:
        """Return True if the step has been logged and its rollouts, if the recorded run has them, are stored."""
        if self.step not in logged_steps(self.folder):
            return False
        file = ROLLOUTS.format(step=self.step)
        return (self.folder / file).is_file() or not (self.run / file).is_file()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the repeated run after the step that it is in, or after STOP_S seconds at once."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command_line = argparse.ArgumentParser(
        prog="replay.sh",
        description="Repeat a training step from the nearest checkpoint and the stored rollouts, and compare it.",
    )
    command_line.add_argument("run", type=Path, metavar="RUN", help="folder of the recorded run, such as runs/a")
    command_line.add_argument("--step", type=int, required=True, help="number of the training step, from 1")
    command_line.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="options to change in the repeated steps"
    )
    command_line.add_argument(
        "--regenerate", action="store_true", help="generate the rollouts again instead of reading them"
    )
    command_line.add_argument(
        "--out", type=Path, help="folder of the replay (default: RUN/replays/step_N, or step_N_changed)"
    )
    return command_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a step. Return the exit code: 0 equal or changed options, 1 different, 2 not possible, 130 stopped."""
    options = parser().parse_args(arguments)
    if wrong := [change for change in options.set if "=" not in change]:
        parser().error(f"--set {wrong[0]}: write NAME=VALUE")
    run = options.run.expanduser().resolve()
    name = f"step_{options.step}" + ("_changed" if options.set else "") + ("_regenerated" if options.regenerate else "")
    folder = (options.out or run / "replays" / name).expanduser().resolve()
    replay = Replay(run, options.step, folder, tuple(options.set), options.regenerate)
    try:
        first_step = replay.execute()
    except (ValueError, OSError) as error:
        print(f"replay.sh: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("replay.sh: stopped", file=sys.stderr)
        return 130
    if options.set:
        print_changes(replay, first_step)
        return 0
    return print_verdict(replay, first_step)


def print_verdict(replay: Replay, first_step: int) -> int:
    """Print whether all repeated steps equal the recorded ones. Return the exit code."""
    compared = 0
    for step in range(first_step, replay.step + 1):
        all_differences = list(differences(replay.run, replay.folder, step))
        if all_differences:
            print(f"replay: {all_differences[0]}")
            for difference in all_differences[1:]:
                print(f"  then {difference.quantity}: {difference.name} {difference.detail}")
            for change in environment_changes(replay.run, replay.folder):
                print(f"  the environment has changed: {change}")
            return 1
        compared += 1
    print(f"replay: step {replay.step} is equal to the bit, as are the {compared - 1} repeated steps before it")
    return 0


def print_changes(replay: Replay, first_step: int) -> None:
    """Print the metrics of the step in the recorded run and in the replay with changed options."""
    print(f"replay: steps {first_step} to {replay.step} with {' '.join(replay.changes)}")
    before = metrics_of(replay.run, replay.step)
    after = metrics_of(replay.folder, replay.step)
    rows: list[tuple[str, Any, Any]] = []
    for name, value in before.items():
        if name in after and not name.startswith(UNRELATED) and value != after[name]:
            rows.append((name, value, after[name]))
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, old, new in rows:
        print(f"  {name:{width}}  {_number(old)} -> {_number(new)}")
    for difference in differences(replay.run, replay.folder, replay.step):
        if difference.quantity not in ("metrics", "weights"):
            print(f"  {difference.quantity}: {difference.name} {difference.detail}")
    if not rows:
        print("  no metric of the step has changed")


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

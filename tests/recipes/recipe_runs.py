"""Starts recipes like a user does, and reads their results."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest
from safetensors.torch import load_file

from tests.processes import left_behind, wait_until_gone
from training.tracking.metrics import metric_of

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).parents[2]
GUARD_S = 850
"""Timeout of a run in seconds: far above the duration of any run, slightly below pytest's timeout of a test."""
NOT_METRICS = {"step", "time", "nonfinite"}
"""Fields of a line of metrics.jsonl that are no metrics."""
OUTSIDE_STEP = {"step", "checkpoint", "save_checkpoint", "testing"}
"""Phases that are timed but are not part of the time of a step."""
PARTS = ("sync_", "generate_")
"""Prefixes of the names of times inside the phases of the weight sync and the generation. They are not phases."""
OF_STEPS = {"perf/tokens_per_second", "perf/samples_per_second"}
"""Metrics that every step of every recipe logs."""
OF_ANSWERS = {"rollout/staleness_max", "rollout/staleness_mean", "rollout/truncated_share"}
"""Further metrics of the recipes whose steps have responses."""


class RunFolder:
    """Files written by a run so far."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def summary(self) -> dict[str, Any]:
        """Content of summary.json."""
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Content of metrics.jsonl: a dict per training step."""
        return [line for line in self.lines if line["step"]]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Content of metrics.jsonl, including the evaluation before training, which is step 0."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def check_metrics(self) -> None:
        """Check that every metric is in the registry, and that the metrics of all recipes exist."""
        lines, logged = self.metrics, set[str]()
        for line in lines:
            names = line.keys() - NOT_METRICS
            columns, is_grouped = self._rollouts(line["step"])
            logged |= columns
            assert not (unknown := [name for name in names if not is_known(name, names, logged)]), unknown
            if "timing_s/step" in names:
                times = {name.removeprefix("timing_s/") for name in names if name.startswith("timing_s/")}
                phases = {name for name in times if not name.startswith(PARTS)}
                if "wait" not in phases:  # otherwise the phases of two threads are shown
                    seconds = sum(line[f"timing_s/{phase}"] for phase in phases - OUTSIDE_STEP)
                    assert seconds == pytest.approx(line["timing_s/step"], rel=0.01)
                required = OF_STEPS | {f"perf/{phase}_share" for phase in phases - OUTSIDE_STEP}
                required |= OF_ANSWERS if "reward/score" in names else set()
                # If only the critic is trained, the policy may not have been called.
                required |= {"rollout/logprob_gap_mean"} if {"reward/score", "actor/loss"} <= names else set()
                required |= {"reward/group_std", "reward/zero_variance_share"} if is_grouped else set()
                assert not (missing := required - names), missing
        # Processes report their memory every 2 s to a master in another process.
        if lines and self.starts() and lines[-1]["time"] - lines[0]["time"] > 60:
            assert any("perf/memory_gb" in line for line in lines)

    def _rollouts(self, step: int) -> tuple[set[str], bool]:
        """Return the names that the rewards of a step logged, and True if a prompt has several responses."""
        path = self.run_dir / "rollouts" / f"step_{step:06d}.parquet"
        if not path.exists():
            return set(), False
        table = pyarrow.parquet.read_table(path)
        branches = table["branch"].to_pylist() if "branch" in table.column_names else [0] * len(table)
        prompts = [p for p, branch in zip(table["prompt_id"].to_pylist(), branches, strict=True) if branch == 0]
        logged = {name.removeprefix("log_") for name in table.column_names if name.startswith("log_")}
        return logged, len(set(prompts)) < len(prompts)

    def pids(self) -> dict[str, int]:
        """Process id of the last start of each worker, from its log."""
        return {name: pids[-1] for name, pids in self.starts().items()}

    def starts(self) -> dict[str, list[int]]:
        """Process ids of all starts of each worker."""
        starts_by_name = {
            log.stem: [int(pid) for pid in re.findall(r"^\S+: process (\d+) on ", log.read_text(), re.MULTILINE)]
            for log in (self.run_dir / "logs").glob("*.log")
        }
        return {name: pids for name, pids in starts_by_name.items() if pids}

    def learnt(self) -> list[dict[str, Any]]:
        """Return the metrics without those that depend on time: durations, speeds, and checkpoint writing."""
        timed = ("time", "timing", "perf")
        return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in self.lines]

    def weights(self) -> "dict[str, Tensor]":
        """Return all tensors in the checkpoint of the last step, by file and name."""
        folder = self.run_dir / "checkpoints" / f"step_{self.summary['steps']}"
        files = {file: load_file(file) for file in sorted(folder.rglob("*.safetensors"))}
        return {
            f"{file.relative_to(folder)}:{name}": x for file, tensors in files.items() for name, x in tensors.items()
        }


class Run(RunFolder):
    """A recipe in a separate process, as a user starts it."""

    def __init__(
        self, recipe: str, ray_address: str, run_dir: Path, *options: str, env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(run_dir)
        env = os.environ | {"RAY_ADDRESS": ray_address, "PYTHONPATH": str(ROOT)} | dict(env or {})
        command = [sys.executable, "-m", f"recipes.{recipe}.main", f"run_dir={run_dir}", *options]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait(self) -> "Run":
        """Wait for the end. A run that hangs is killed and fails the test."""
        try:
            self.out, self.err = self.process.communicate(timeout=GUARD_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.code = self.process.returncode
        self.check_metrics()
        return self

    def left_behind(self) -> list[str]:
        """Return the processes, shared memory, actors and placement groups of the run that still exist."""
        run_id = (self.run_dir / "logs" / "trainer-0.log").read_text().split(" in run ")[-1].split()[0]
        wait_until_gone(*itertools.chain.from_iterable(self.starts().values()), timeout_s=60)
        # Reward code runs in children of the reward role. Their command ends with its process id.
        wait_until_gone(*running("reward_workers", self.pids().get("reward-0")), timeout_s=60)
        return left_behind(run_id)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition on the running run is true."""
        deadline = time.monotonic() + GUARD_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the run hangs"
            time.sleep(0.05)

    def kill(self) -> list[int]:
        """End the driver like `kill -9`. Return its workers, which end with it."""
        self.process.kill()
        self.process.communicate()
        pids = list(self.pids().values())
        # Reward code runs in children of a role. Their command ends with its process id.
        children = itertools.chain.from_iterable(running("reward_workers", pid) for pid in pids)
        wait_until_gone(*pids, *children, timeout_s=60)
        return pids


def is_known(name: str, names: Collection[str], logged: Collection[str]) -> bool:
    """True if a metric is in the registry. A member of a family also needs the metric or log it derives from.

    Args:
        name: Name of the metric.
        names: Names of all metrics of its step.
        logged: Names that the rewards have logged.
    """
    metric = metric_of(name)
    if metric is None:
        return False
    if metric.name == "reward/<name>":
        return name.removeprefix("reward/") in logged
    if metric.name == "eval/<source>_<name>":
        return any(name.startswith(other.removesuffix("score")) for other in names if other.endswith("_score"))
    return metric.name != "timing_per_token_ms/<phase>" or name.replace("per_token_ms", "s") in names


def running(module: str, last_argument: object) -> list[int]:
    """Return the processes of a module of this project whose command ends with this argument."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")[:-1]
        except OSError:  # it has ended in the meantime
            continue
        if words and any(word.endswith(module) for word in words) and words[-1] == str(last_argument):
            processes.append(int(folder.name))
    return processes

"""Rehearsal of a recipe's command: `bash recipes/<recipe>/run.sh <options of the cluster> rehearse=true`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from components.models.size import model_size
from components.models.sources import is_made
from components.net.hub import first_line
from components.registry import find, load, require
from core.placement import assumed_devices
from plugins.rehearsal.fold import Fold, fold_engines, fold_roles, fold_sizes
from plugins.rehearsal.stages import SmallRun, rehearse_run
from plugins.rehearsal.table import DOUBTFUL, FAILED, Table
from training.launch.command import Command
from training.launch.machines import assumed, assumed_machines
from training.launch.plan import CHOICES, PLAN, Plan
from training.options.config import CommandLine
from training.run.checkpoint_size import checkpoint_bytes

GPUS = 8
"""Number of GPUs of each machine if neither assume_devices nor placement.devices_per_node sets it."""
GPU_GB = 80
"""Memory of a GPU if assume_devices does not set it."""


def rehearse(command: Command[Any], line: CommandLine[Any]) -> int:
    """Rehearse a command. Return the exit code: 0 go, 1 no-go.

    Raises:
        ValueError, OSError: the run would be refused for its options.
    """
    began = time.monotonic()
    recipe = command.folder.name
    require("small model", "shrink", "rehearse=true")
    require("input trial", "template", "rehearse=true")
    with cluster(line):
        requested = command.requested_config(line)
        plan = command.plan(requested, line)
        if choose := find(PLAN, CHOICES):
            plan = choose(plan, requested, lambda changed: command.plan(changed, line))
        paths = command.models(plan.config)
    folder = new_folder(Path(requested.run_dir).expanduser())
    table = Table(recipe)
    table.begin(folder)
    _describe_command(table, line, plan)
    rehearsal = Rehearsal(command, plan, requested, folder, table)
    # DeepSpeed would otherwise print a warning into the table.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Also on a machine with a GPU: the small run has more ranks than such a machine has GPUs.
    token = assumed_devices.set(0)
    try:
        rehearsal.run(paths)
    finally:
        assumed_devices.reset(token)
        rehearsal.clean()
    rehearsal.describe_untried()
    code = table.conclude(time.monotonic() - began)
    (folder / "rehearsal.txt").write_text(table.text(), encoding="utf-8")
    return code


@contextmanager
def cluster(line: CommandLine[Any]) -> Iterator[None]:
    """Plan for the machines of the command: those of assume_devices, or GPUS of GPU_GB on each of its nodes."""
    text = line.value("assume_devices")
    nodes = line.value("placement.nodes")
    devices = line.value("placement.devices_per_node") or line.value("placement.ranks_per_node") or GPUS
    machines = str(text or f"{devices}x{nodes or 1}x{GPU_GB}GB")
    with load("assumed machines", "assuming", "rehearse=true")(machines):
        if text is None and nodes is None:
            # Without a number of nodes, the command may still spread its roles over several.
            assumed_machines.set(replace(assumed(), nodes=None))
        yield


def new_folder(run_dir: Path) -> Path:
    """Create a folder beside the run folder, which a rehearsal leaves untouched."""
    for number in count(1):
        folder = run_dir.with_name(f"{run_dir.name}-rehearsal-{number}").absolute()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def _describe_command(table: Table, line: CommandLine[Any], plan: Plan) -> None:
    """Report the options, and those that have no effect."""
    notes = [line.renamed(note) for note in (*line.notes, *plan.notes)]
    idle = [note for note in notes if note.startswith("no effect of")]
    text = f"{len(line.named)} options are accepted"
    if idle:
        table.add("command", DOUBTFUL, f"{text}; {'; '.join(idle)}")
    else:
        table.passed("command", text)


class Rehearsal:
    """The parts of one rehearsal, in their order."""

    def __init__(self, command: Command[Any], plan: Plan, requested: Any, folder: Path, table: Table) -> None:
        """
        Args:
            command: command of the recipe.
            plan: plan at the full size.
            requested: options of the command.
            folder: folder of the rehearsal.
            table: receives the verdicts.
        """
        self.command = command
        self.plan = plan
        self.requested = requested
        self.folder = folder
        self.table = table
        self.fold = Fold.of(requested)
        self.checkpoints = folder / "run" / "checkpoints"

    def run(self, paths: Mapping[str, str]) -> None:
        """Rehearse all parts, until one fails that the others need.

        Args:
            paths: paths of the models of the command, by option.
        """
        fold_roles(self.fold, self.plan)
        fold_engines(self.fold, self.plan)
        try:
            self._shrink(paths)
            config = self._check_inputs()
        except (ValueError, OSError) as error:
            self.table.add("inputs", FAILED, str(error))
            return
        self._try("W&B key", self.requested)
        tokenizer = self._check_rows(config, paths)
        if self.table.code:
            return
        roles = len(self.plan.job.roles)
        fold_sizes(self.fold, self.folder, roles)
        self._place_checkpoints()
        arguments = self.fold.arguments(self.folder / "rehearsal.yaml")
        self.table.passed("folded", "; ".join(self.fold.changes) or "nothing is smaller")
        module = f"{self.command.schema.__module__.rpartition('.')[0]}.main"
        small = SmallRun(module, arguments, self.folder, self.checkpoints)
        evaluation = config.evaluation
        evaluates = bool(evaluation.path or getattr(evaluation, "held_out", 0))
        rehearse_run(self.table, small, evaluates=evaluates, resumes_with=self._resumed_options)
        if not self.table.code:
            self._try("export", self.folder / "export", tokenizer)

    def _shrink(self, paths: Mapping[str, str]) -> None:
        """Write a small copy of every model, and set its path."""
        shrink = load("small model", "shrink", "rehearse=true")
        head_sizes = {"vllm": load("small model", "head size of kernels")}
        head_size = head_sizes.get(str(self.fold.values.get("rollout.engine")))
        small_paths: dict[str, list[str]] = {}
        copies: dict[str, tuple[str, int]] = {}
        for option, path in paths.items():
            if not is_made(path) and path not in copies:
                target = self.folder / "models" / f"model_{len(copies)}"
                overrides = {"model.path": self.requested.model.config_overrides}.get(option, {})
                copies[path] = str(target), shrink(path, target, overrides, head_size=head_size)
            small_paths.setdefault(option.partition("[")[0], []).append(copies.get(path, (path, 0))[0])
        for option, folders in small_paths.items():
            self.fold.put(option, ",".join(folders))
        for path, (_, parameters) in copies.items():
            size = model_size(path)
            full = "unknown"
            if size is not None:
                full = f"{size.parameters / 1e9:.2g} B"
            self.table.passed("model", f"{path}: {full} to {parameters / 1e6:.2g} M parameters, random weights")
        self.fold.put("model.config_overrides", {})

    def _check_inputs(self) -> Any:
        """Check models, data, rewards and agents with all rows, as the run does. Return the resolved configuration."""
        start = {"rehearse": False, "assume_devices": None, "dry_run": False, "print_config": False}
        for name, value in (start | {"resume": "none"}).items():
            self.fold.put(name, value)
        line = CommandLine(self.command.schema, self.fold.arguments(self.folder / "checked.yaml"))
        plan = self.command.plan(line.config(), line)
        self.command.check(plan)
        notes = [note for note in plan.notes if "first row" in note or "left out" in note]
        self.table.passed("inputs", "; ".join([plan.steps, *notes]))
        return plan.config

    def _check_rows(self, config: Any, paths: Mapping[str, str]) -> Any:
        """Check tokenizer, labels, template and reward with the first rows. Return the tokenizer of the run, or None
        for a model that the run creates.
        """
        if is_made(config.model.path):
            self.table.passed("tokenizer", f"that of {config.model.path}, which the run creates")
            return None
        tokenizer = config.model.tokenizer()
        self._try("tokenizer", config, paths["model.path"], tokenizer)
        if not hasattr(config, "rollout"):
            source = config.sources[0]
            self._try("template", config, config.load(source.name, source.split, 100), tokenizer)
            return tokenizer
        command: Any = self.command
        rows = command.rows(config)
        self._try("labels", config, rows)
        self._try("template", config, rows, tokenizer)
        # verl's function has other arguments. The check of the inputs has called it.
        if not hasattr(config.reward, "function") and config.reward_source:
            self._try("reward", config, rows, self.plan.config.step_size)
        return tokenizer

    def _try(self, name: str, *arguments: Any) -> None:
        """Run a check of the plug-in input_trial, and add its verdict."""
        check = load("input trial", name, "rehearse=true")
        try:
            verdict, text = check(*arguments)
        except Exception as error:  # noqa: BLE001 - code of the user and templates may raise anything
            self.table.add(name, FAILED, first_line(error))
            return
        if text:
            self.table.add(name, verdict, text)

    def _place_checkpoints(self) -> None:
        """Write the checkpoints to the disk that the command names, if this machine has it."""
        path = self.fold.values["checkpoint.path"]
        if path is None:
            return
        target = Path(path).expanduser().absolute()
        if not any(parent.is_dir() for parent in (target, *target.parents[:-1])):
            self.fold.leave_out("checkpoint.path", None, "this machine has no such disk")
            return
        self.checkpoints = target / f"{self.folder.name}-{os.getpid()}"
        self.fold.put("checkpoint.path", str(self.checkpoints))

    def _resumed_options(self, last: int) -> list[str]:
        options = ["checkpoint.every=-1"]
        if "max_steps" in self.fold:
            options.append(f"max_steps={last + 1}")
        return options

    def describe_untried(self) -> None:
        """Report the parts that no laptop can rehearse, with the numbers of the plan."""
        table = self.table
        memory = self.plan.memory
        if memory is not None:
            texts = [text for head, text in memory.paragraphs() if head == "memory"]
            try:
                memory.check()
                table.untried("memory", f"as planned: {'; '.join(texts)}")
            except ValueError as error:
                table.add("memory", FAILED, f"as planned: {error}")
        size = checkpoint_bytes(self.plan.config)
        if size:
            table.untried("disk", f"a checkpoint has {size / 1e9:,.0f} GB; {self.plan.config.checkpoint.keep} are kept")
        for name, reason in self.fold.untried:
            table.untried("not here", f"{name}: {reason}")
        table.untried("NCCL, speed", "needs the GPUs and the network of the cluster; python scripts/doctor.py there")

    def clean(self) -> None:
        """Remove the models and checkpoints of the rehearsal. Logs, metrics and the table are kept."""
        for path in (self.folder / "models", self.folder / "export", self.checkpoints):
            shutil.rmtree(path, ignore_errors=True)
        for name in ("rehearsal.yaml", "checked.yaml"):
            (self.folder / name).unlink(missing_ok=True)

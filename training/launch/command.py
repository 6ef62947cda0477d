"""The command line of a recipe: options, then the plan, then checks of the inputs, then the run."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from components.process.streams import accept_any_text
from core import Job
from core.backends.ray_address import check_reachable, is_ray_left
from core.placement import detect_devices
from training.launch.early_writes import check_writes
from training.launch.launch import role_sizes, run_job
from training.launch.machine_limits import check_machine
from training.launch.machines import Machines, assuming, is_here
from training.launch.model_checks import absent_models
from training.launch.plan import Plan
from training.options.config import CommandLine, read_file
from training.options.help import print_help
from training.options.model_options import ModelOptions
from training.options.run_options import RunOptions
from training.run.continuation import Continued, continued_run
from training.tracking import open_run_folder
from training.tracking.observers import RunObserver, close_observers, open_observers

C = TypeVar("C", bound=RunOptions)

STOPPED_BY = (signal.SIGINT, signal.SIGTERM)
_OF_CORE = {"node_num": "placement.nodes", "device_per_node": "placement.devices_per_node"}
"""Names in messages of core, which users of a recipe know otherwise."""


class Command(ABC, Generic[C]):
    """What main.py of a recipe runs. A subclass says how a job is planned, and what is checked before it starts."""

    is_adapted: bool = False
    """Whole commands of another system are taken, which say all that their run is to be."""

    def __init__(self, schema: type[C], folder: Path, build_job: Callable[[C], Job]) -> None:
        """
        Args:
            schema: the options.
            folder: of the recipe; its name is the recipe's. Its tiny.yaml is the demonstration; its gpu.yaml, where it
                has one, suits a run of the user's own on GPUs.
            build_job: what runs where, of a configuration with everything filled in.
        """
        self.schema = schema
        self.folder = folder
        self.build_job = build_job

    # --- what a kind of recipe says

    @abstractmethod
    def plan(self, asked: C, line: CommandLine[C]) -> Plan:
        """What the run will use, with everything filled in that was left to the machine."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """See that models and data can be there, before any process starts; may complete the plan.

        Raises:
            ValueError, OSError: they cannot.
        """

    def models(self, config: C) -> dict[str, str]:  # noqa: ARG002 - for a subclass
        """Return the paths of the models that a run reads, by option."""
        return {}

    @abstractmethod
    def check_continued(self, plan: Plan, continued: Continued) -> None:
        """Check that the run can continue from the checkpoint that it finds, before anything is written.

        Raises:
            ValueError: it cannot; the message says what to set.
        """

    @abstractmethod
    def ready(self, config: C) -> C:
        """The configuration that the job is given; makes a demonstration's model where one is asked for."""

    def check_writes(self, plan: Plan) -> list[str]:
        """Try to write now what a run writes late; returns notes.

        Raises:
            ValueError: something cannot be written; the message says what to set.
        """
        return check_writes(plan.config, self.exported(plan.config), plan.step_count)

    @abstractmethod
    def exported(self, config: C) -> ModelOptions | None:
        """Return the model that the run exports; None where it is still to be made."""

    def words(self, arguments: list[str]) -> list[str]:
        """The command line as `CommandLine` reads it, of one that is written in another way."""
        return arguments

    def idle_presets(self, line: CommandLine[C]) -> dict[str, str]:  # noqa: ARG002 - for a subclass
        """Options that gpu.yaml may set and that do not go with what the user asks for, and why."""
        return {}

    def first_example(self, config: C) -> list[str]:  # noqa: ARG002 - for a subclass
        """Describe what the model reads first, of data and a model that are files of this machine.

        Raises:
            ValueError: the data cannot be read, or not by this model.
        """
        return []

    # --- what all have in common

    def read(self, arguments: list[str]) -> C:
        """What the user asks for."""
        return self.asked(CommandLine(self.schema, self.words(arguments)))

    def asked(self, line: CommandLine[C]) -> C:
        """What the user asks for: over the demonstration, or, with a model of their own, over what suits GPUs."""
        if "model.path" not in line.named:
            line.start_from(read_file(self.schema, self.folder / "tiny.yaml"))
        elif self.takes_gpu_preset(line):
            options = read_file(self.schema, self.folder / "gpu.yaml")
            idle = self.idle_presets(line)
            taken = [option for option in options if option.name not in idle]
            line.start_from(taken)
            values = " ".join(f"{option.name}={option.value}" for option in taken)
            line.notes.append(f"there are GPUs, so gpu.yaml of the recipe sets, where you do not, {values}")
            left = [option.name for option in options if option.name in idle]
            line.notes += [f"gpu.yaml's {name} is left out: {idle[name]}" for name in left]
        return line.config()

    def takes_gpu_preset(self, line: CommandLine[C]) -> bool:
        """Whether there are GPUs, and the user has neither a file of their own nor a command of another system."""
        if not (self.folder / "gpu.yaml").is_file() or not detect_devices():
            return False
        if any(file.resolve().parent != self.folder.resolve() for file in line.files):
            return False
        return not (self.is_adapted and any(option != word for option, word in line.written.items()))

    def main(self, arguments: list[str] | None = None) -> int:
        """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
        began = time.time()
        accept_any_text()
        arguments = sys.argv[1:] if arguments is None else arguments
        if (code := print_help(self.schema, arguments)) is not None:
            return code
        line = CommandLine(self.schema, self.words(arguments))
        observers: list[RunObserver] = []
        try:
            _check_text(arguments)
            with assuming(_machines(line)):
                asked = self.asked(line)
                absent = absent_models(self.models(asked)) if asked.dry_run else {}
                plan = self.plan(asked, line)
                plan.absent = absent
                plan.notes = [*line.notes, *(line.renamed(note) for note in plan.notes)]
                if asked.print_config:
                    plan.print_config(asked, line.named)
                    return 0
                if asked.dry_run:
                    self._dry_run(plan)
                    return 0
                plan.check_and_show()
                config = plan.config
                # Before the checks of models and data, which start processes of their own.
                check_machine(config.backend, len(plan.job.placement.hosts))
                if config.backend == "ray" and (address := os.environ.get("RAY_ADDRESS")):
                    check_reachable(address)
                self.check(plan)
            config = plan.config
            continued = continued_run(config, plan.recipe)
            if continued is not None:
                self.check_continued(plan, continued)
            observers = open_observers(plan.recipe, config, role_sizes(plan.job))
            run_dir = open_run_folder(config.run_dir, config.resume)
            config = replace(config, run_dir=str(run_dir))
            plan.notes = [*plan.notes, *self.check_writes(plan)]
            plan.job.config = self.ready(config)
            (run_dir / "plan.json").write_text(plan.json(), encoding="utf-8")
        except (ValueError, OSError) as error:
            close_observers(observers)
            text = re.sub(r"\w+", lambda word: _OF_CORE.get(word[0], word[0]), str(error))
            print(f"{self.folder.name}: {line.renamed(text)}", file=sys.stderr)
            return 2
        return run_job(
            plan.job,
            recipe=plan.recipe,
            run_dir=run_dir,
            seed=config.seed,
            backend=config.backend,
            began=began,
            lines=plan.lines(),
            seconds={"warm_start": time.time() - began},
            observers=observers,
        )

    def _dry_run(self, plan: Plan) -> None:
        """Run all checks of a run, and print the plan. Where the run is planned for other machines, faults of models
        and data are notes: what this machine has need not be what they have.

        Raises:
            ValueError, OSError: the run would be refused.
        """
        fault = None
        try:
            self.check(plan)
        except (ValueError, OSError) as error:
            fault = error
            if not is_here():
                plan.notes = [*plan.notes, f"with the models and data of this machine it would be refused: {error}"]
        print(plan.json())
        plan.check_and_show(always=True)
        if fault is None:
            self._show_first(plan)
        elif is_here():
            raise fault

    def _show_first(self, plan: Plan) -> None:
        """Show the first example with a dry run, if that takes no download and no model that is still to be made."""
        config: Any = plan.config
        names = [name.strip() for name in config.data.path.split(",")]
        if all(Path(name).expanduser().exists() for name in (config.model.path, *names)):
            for text in self.first_example(plan.config):
                print(f"{self.folder.name}: {text}", file=sys.stderr)

    def run(self) -> NoReturn:
        """`main`, as a program: Ctrl-C or SIGTERM before the job's own handling of them ends it with one line, and exit
        code 130 or 143.
        """
        stopped_by = signal.SIGINT

        def stop(number: int, _: Any) -> None:
            nonlocal stopped_by
            stopped_by = signal.Signals(number)
            raise KeyboardInterrupt

        for number in STOPPED_BY:
            signal.signal(number, stop)
        try:
            code = self.main()
            if is_ray_left.is_set():
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(code)  # threads of Ray's library would keep the process from ending
            sys.exit(code)
        except KeyboardInterrupt:
            print(f"{self.folder.name}: stopped before the start", file=sys.stderr, flush=True)
            sys.exit(128 + stopped_by)


def _check_text(arguments: Sequence[str]) -> None:
    """Raise ValueError for an argument that the encoding of this process cannot read: no file of a run can hold it."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{argument}: it is not {sys.getfilesystemencoding()} text, as which arguments are read here; rename "
                "the file, or set LC_ALL=C.UTF-8"
            ) from None


def _machines(line: CommandLine[Any]) -> Machines | None:
    """What the run is planned for, where that is not this machine."""
    try:
        written = line.value("assume_devices")
        return Machines.parse(str(written)) if written not in (None, "") else None
    except ValueError:
        return None  # as the options are read, all that is wrong with them is said

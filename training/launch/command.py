"""The command line of a recipe: read the options, plan the run, check the inputs, and run the job."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from components.process.streams import accept_any_text
from components.registry import find, load, names
from core import Job
from core.backends.ray_address import check_reachable, is_ray_left
from core.placement import detect_devices
from training.launch.launch import role_sizes, run_job
from training.launch.plan import CHOICES, PLAN, Plan
from training.options.config import CommandLine, Vocabulary
from training.options.help import print_help
from training.options.model_options import ModelOptions
from training.options.run_options import RunOptions
from training.run.checkpoint import may_resume
from training.tracking import open_run_folder
from training.tracking.observers import RunObserver, close_observers, open_observers

C = TypeVar("C", bound=RunOptions)

STOPPED_BY = (signal.SIGINT, signal.SIGTERM)
_OF_CORE = {"node_num": "placement.nodes", "device_per_node": "placement.devices_per_node"}
"""Names in messages of core, and the options of a recipe that they correspond to."""


class Command(ABC, Generic[C]):
    """The command that main.py of a recipe runs. A subclass plans the job and checks its inputs before it starts."""

    is_adapted: bool = False
    """True if the recipe accepts complete commands of another system. Presets for GPUs do not apply to them."""
    DATA: ClassVar[str]
    """Data that a run is trained on, "prompts" or "examples". The plug-in `resume` checks a continued run by it."""

    def __init__(self, schema: type[C], folder: Path, build_job: Callable[[C], Job]) -> None:
        """
        Args:
            schema: dataclass of the options.
            folder: folder of the recipe. Its name is the name of the recipe. Its tiny.yaml holds the options of the
                demonstration. Its gpu.yaml, if there is one, holds presets for runs of other models on GPUs.
            build_job: returns the job of a configuration whose automatic values are resolved.
        """
        self.schema = schema
        self.folder = folder
        self.build_job = build_job

    # --- methods that a subclass defines

    @abstractmethod
    def plan(self, requested: C, line: CommandLine[C]) -> Plan:
        """Plan the requested run, with all automatic values resolved."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Check models and data before any process starts. May complete the plan.

        Raises:
            ValueError, OSError: a model or the data are missing or unusable.
        """

    def models(self, config: C) -> dict[str, str]:  # noqa: ARG002 - for a subclass
        """Return the paths of the models that a run reads, by option."""
        return {}

    @abstractmethod
    def ready(self, config: C) -> C:
        """Return the configuration of the job. Create the model of the demonstration if it is used."""

    def check_writes(self, plan: Plan) -> list[str]:
        """Try the writes that a run makes late. Return notes for the user.

        Raises:
            ValueError: a write fails. The message says what to set.
        """
        check = find("start check", "writes")
        return [] if check is None else check(plan.config, self.exported(plan.config), plan.step_count)

    @abstractmethod
    def exported(self, config: C) -> ModelOptions | None:
        """Return the model that the run exports, or None if it is created later."""

    def words(self, arguments: list[str]) -> list[str]:
        """Translate arguments in the syntax of another system to those of `CommandLine`."""
        is_pasted = bool(arguments) and "=" not in arguments[0] and not arguments[0].startswith("-")
        return (find("command line", "pasted") or list)(arguments) if is_pasted else arguments

    def idle_presets(self, line: CommandLine[C]) -> dict[str, str]:  # noqa: ARG002 - for a subclass
        """Return the options of gpu.yaml that conflict with the requested options, each with the reason."""
        return {}

    def first_example(self, config: C) -> list[str]:  # noqa: ARG002 - for a subclass
        """Describe the first example as the model reads it. Data and model must be local files.

        Raises:
            ValueError: the data cannot be read or do not fit the model.
        """
        return []

    # --- methods that all commands share

    def read(self, arguments: list[str]) -> C:
        """Return the requested configuration, with automatic values unresolved."""
        return self.requested_config(CommandLine(self.schema, self.words(arguments)))

    def requested_config(self, line: CommandLine[C]) -> C:
        """Return the requested configuration: the options of the user over those of a preset.

        Without model.path the preset is tiny.yaml, the demonstration. With model.path on GPUs it is gpu.yaml.
        """
        if "model.path" not in line.named:
            line.start_from(Vocabulary.from_schema(self.schema).read_file(self.folder / "tiny.yaml"))
        elif self.takes_gpu_preset(line):
            options = Vocabulary.from_schema(self.schema).read_file(self.folder / "gpu.yaml")
            idle = self.idle_presets(line)
            line.start_from([option for option in options if option.name not in idle])
            values = " ".join(f"{option.name}={option.value}" for option in options if option.name not in idle)
            line.notes.append(f"on GPUs, gpu.yaml of the recipe sets the options that you do not set: {values}")
            left = [option.name for option in options if option.name in idle]
            line.notes += [f"{name} of gpu.yaml is left out: {idle[name]}" for name in left]
        return line.config()

    def takes_gpu_preset(self, line: CommandLine[C]) -> bool:
        """Return True if there are GPUs, and the user gave no configuration file and no command of another system."""
        if not (self.folder / "gpu.yaml").is_file() or not detect_devices():
            return False
        # A file of the user is a complete configuration. Values of a preset would change the run that it describes.
        if any(file.resolve().parent != self.folder.resolve() for file in line.files):
            return False
        return not (self.is_adapted and any(option != word for option, word in line.written.items()))

    def main(self, arguments: list[str] | None = None) -> int:
        """Run the recipe. Return the exit code: 0 finished, 1 failed, 2 invalid input, 130 stopped."""
        began = time.time()
        # File names and messages may hold any characters, also under a locale that cannot print them.
        accept_any_text()
        arguments = sys.argv[1:] if arguments is None else arguments
        if (code := print_help(self.schema, arguments)) is not None:
            return code
        line = CommandLine(self.schema, self.words(arguments))
        observers: list[RunObserver] = []
        try:
            _check_text(arguments)
            if line.is_on("rehearse"):
                return load("rehearsal", "command", "rehearse=true")(self, line)
            with _planned_machines(line):
                requested = self.requested_config(line)
                absent: dict[str, str] = {}
                if requested.dry_run:
                    # Before the plan, which computes the memory from the config.json that this fetches of each model.
                    absent = load("dry run", "models", "dry_run=true")(self.models(requested))
                plan = self.plan(requested, line)
                if choose := find(PLAN, CHOICES):
                    plan = choose(plan, requested, lambda changed: self.plan(changed, line))
                plan.absent = absent
                _prepare_workers(plan)
                plan.notes = [*line.notes, *(line.renamed(note) for note in plan.notes)]
                if requested.print_config:
                    plan.print_config(requested, line.named)
                    return 0
                if requested.dry_run:
                    load("dry run", "plan", "dry_run=true")(self, plan)
                    return 0
                plan.check_and_show()
                # Before the checks of models and data: they start processes, which fail without a clear message if
                # the limits of the machine are too low.
                if check_machine := find("start check", "machine"):
                    check_machine(requested.backend, len(plan.job.placement.hosts))
                if requested.backend == "ray" and (address := os.environ.get("RAY_ADDRESS")):
                    check_reachable(address)
                self.check(plan)
            config = plan.config
            if (continued := _continued_run(config, plan.recipe)) is not None:
                load("checkpoint reader", self.DATA, f"run_dir={config.run_dir}")(self, plan, continued)
            observers = open_observers(plan.recipe, config, role_sizes(plan.job))
            # Only now is the folder created, so that a refused command leaves no empty run behind.
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

    def run(self) -> NoReturn:
        """Run `main` as a program, and exit with its code.

        Ctrl-C or SIGTERM before the job handles them ends the program with a one-line message and code 130 or 143.
        """
        stopped_by = signal.SIGINT

        def stop(number: int, _: Any) -> None:
            nonlocal stopped_by
            stopped_by = signal.Signals(number)
            raise KeyboardInterrupt

        # Python's default for SIGTERM ends the process without running any `finally`.
        for number in STOPPED_BY:
            signal.signal(number, stop)
        try:
            code = self.main()
            if is_ray_left.is_set():
                # os._exit does not flush them.
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(code)  # threads of the Ray library would keep the process alive
            sys.exit(code)
        except KeyboardInterrupt:
            print(f"{self.folder.name}: stopped before the start", file=sys.stderr, flush=True)
            sys.exit(128 + stopped_by)


def _prepare_workers(plan: Plan) -> None:
    """Let plug-ins change the job and the environment of its workers, and note what they change."""
    for name in names("job environment"):
        plan.notes = [*plan.notes, *load("job environment", name)(plan.job, plan.config)]


def _check_text(arguments: Sequence[str]) -> None:
    """Raise ValueError for an argument that this process cannot decode, because no file of a run could hold it."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{argument}: arguments are read as {sys.getfilesystemencoding()} here, and this one is not decodable; "
                "rename the file, or set LC_ALL=C.UTF-8"
            ) from None


def _continued_run(config: RunOptions, recipe: str) -> Any:
    """Return the checkpoint that a run resumes from as the plug-in `resume` describes it, or None for a new run folder.

    Raises:
        ValueError: the run cannot resume, or the run folder holds another run.
    """
    options: Any = config  # RunOptions lacks the group `checkpoint`, which every recipe adds
    run_dir = Path(config.run_dir).expanduser()
    checkpoints = Path(options.checkpoint.path or run_dir / "checkpoints").expanduser()
    # summary.json too: a finished run without checkpoints must not be overwritten by the same command.
    if not (may_resume(config.resume, checkpoints) or (run_dir / "summary.json").exists()):
        return None
    return load("checkpoint reader", "command", f"run_dir={config.run_dir}")(config, recipe)


def _planned_machines(line: CommandLine[Any]) -> AbstractContextManager[None]:
    """Return the block inside which the machines of `assume_devices` are planned for, if the option is set."""
    text = line.value("assume_devices")
    # A missing plug-in is reported with the other errors of the options.
    assuming = None if text is None else find("assumed machines", "assuming")
    return nullcontext() if assuming is None else assuming(str(text))

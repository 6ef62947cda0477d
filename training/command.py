"""The command line of a recipe: options, then the plan, then checks of the inputs, then the run."""

from __future__ import annotations

import re
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from core.placement import detect_devices
from training.config import (
    adapter_notes,
    changed_options,
    config_files,
    given_options,
    load_config,
    read_options,
    renamed,
)
from training.launch import open_run, run_job
from training.machines import Machines, assuming
from training.options import RunOptions
from training.plan import Plan
from training.schema import describe_options

C = TypeVar("C", bound=RunOptions)
ASSUME = "assume_devices"

_OF_CORE = {"node_num": "placement.nodes", "device_per_node": "placement.devices_per_node"}
"""Names in messages of core, which users of a recipe know otherwise."""


class Command(ABC, Generic[C]):
    """What main.py of a recipe runs. A subclass says how a job is planned, and what is checked before it starts."""

    models: frozenset[str]
    """Options of which a user names one to have a run of their own; without them the preset is the demonstration."""
    is_adapted: bool = False
    """Whole commands of another system are taken, which say all that their run is to be."""

    def __init__(self, schema: type[C], folder: Path) -> None:
        """
        Args:
            schema: the options.
            folder: of the recipe; its name is the recipe's. Its tiny.yaml is the demonstration; its gpu.yaml, where it
                has one, suits a run of the user's own on GPUs.
        """
        self.schema = schema
        self.folder = folder

    # --- what a kind of recipe says

    @abstractmethod
    def plan(self, asked: C, arguments: list[str]) -> Plan:
        """What the run will use, with everything filled in that was left to the machine."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """See that models and data can be there, before any process starts; may complete the plan.

        Raises:
            ValueError, OSError: they cannot.
        """

    @abstractmethod
    def checkpoints(self, config: C) -> str | None:
        """Folder of the checkpoints; None: in the run folder."""

    def ready(self, config: C) -> C:
        """The configuration that the job is given; makes a demonstration's model where one is asked for."""
        return config

    def renamed(self, text: str, arguments: list[str]) -> str:
        """A sentence that names options, in the names that the user writes."""
        return renamed(self.schema, arguments, text)

    def words(self, arguments: list[str]) -> list[str]:
        """The command line as `load_config` reads it, of one that is written in another way."""
        return arguments

    # --- what all have in common

    def presets(self, arguments: list[str]) -> list[Path]:
        """What a run starts from: the demonstration, or, if it is one of the user's own, what suits the machine."""
        if not given_options(self.schema, arguments) & self.models:
            return [self.folder / "tiny.yaml"]
        gpu = self.folder / "gpu.yaml"
        return [gpu] if gpu.is_file() and self.takes_gpu_preset(arguments) else []

    def takes_gpu_preset(self, arguments: list[str]) -> bool:
        """Whether there are GPUs, and the user has neither a file of their own nor a command of another system."""
        files = config_files(self.schema, arguments)
        if not detect_devices() or any(file.resolve().parent != self.folder.resolve() for file in files):
            return False
        written = read_options(self.schema, arguments).written
        return not (self.is_adapted and any(option != word for option, word in written.items()))

    def preset_notes(self, arguments: list[str]) -> list[str]:
        """What the GPU preset sets, in a line."""
        files = [file for file in self.presets(arguments) if file.name == "gpu.yaml"]
        options = read_options(self.schema, [], files).options
        values = " ".join(f"{option.name}={option.value}" for option in options)
        return [f"there are GPUs, so {files[0].name} of the recipe sets, where you do not, {values}"] if files else []

    def machines(self, arguments: list[str]) -> Machines | None:
        """What the run is planned for, where that is not this machine."""
        values = [option.value for option in read_options(self.schema, arguments).options if option.name == ASSUME]
        try:
            return Machines.parse(str(values[-1])) if values and values[-1] else None
        except ValueError:
            return None  # as the options are read, all that is wrong with them is said

    def read(self, arguments: list[str]) -> C:
        """What the user asks for."""
        return load_config(self.schema, arguments, files=self.presets(arguments))

    def changed(self, arguments: list[str]) -> dict[str, Any]:
        """The options that are not at their defaults."""
        return changed_options(self.schema, arguments, self.presets(arguments))

    def given(self, arguments: list[str]) -> set[str]:
        """The options that the user has named."""
        return given_options(self.schema, arguments)

    def main(self, arguments: list[str] | None = None) -> int:
        """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
        began = time.time()
        arguments = sys.argv[1:] if arguments is None else arguments
        if {"--help", "-h"} & set(arguments):
            print(describe_options(self.schema))
            return 0
        try:
            arguments = self.words(arguments)
            with assuming(self.machines(arguments)):
                asked = self.read(arguments)
                plan = self.plan(asked, arguments)
                notes = self.renamed("\n".join(plan.notes), arguments).splitlines()
                plan.notes = [*adapter_notes(self.schema, arguments), *self.preset_notes(arguments), *notes]
                if plan.is_all(asked, self.given(arguments)):
                    return 0
                self.check(plan)
            config = plan.config
            run_dir = open_run(config.run_dir, config.resume, self.checkpoints(config), plan.json())
            plan.job.config = self.ready(replace(config, run_dir=str(run_dir)))
        except (ValueError, OSError) as error:
            text = re.sub(r"\w+", lambda word: _OF_CORE.get(word[0], word[0]), str(error))
            print(f"{self.folder.name}: {self.renamed(text, arguments)}", file=sys.stderr)
            return 2
        return run_job(
            plan.job,
            recipe=plan.recipe,
            run_dir=run_dir,
            seed=config.seed,
            backend=config.backend,
            began=began,
            job_name=getattr(config, "job_name", ""),
            lines=plan.lines(),
            seconds={"warm_start": time.time() - began},
        )

    def run(self) -> NoReturn:
        """`main`, as a program."""
        try:
            sys.exit(self.main())
        except KeyboardInterrupt:  # before there was anything to stop
            sys.exit(130)

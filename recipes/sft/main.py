"""From the command line to a finished run: configuration -> job -> submit."""

import sys
import time
from dataclasses import replace
from pathlib import Path

from components.data.records import read_records
from components.data.tasks import get_task
from components.hub import find_model
from core import Job, JobBuilder, Role
from training.config import ConfigError, changed_options, describe_options, given_options, load_config
from training.launch import STOP_GRACE_S, open_run
from training.plan import supervised_plan

from .config import RECIPE, SFTConfig

PRESET = Path(__file__).parent / "tiny.yaml"


def presets(arguments: list[str]) -> list[Path]:
    """What a run starts from: without a model or a configuration file of the user's own the tiny preset."""
    return [] if given_options(SFTConfig, arguments) & {"pretrain", "config"} else [PRESET]


def read_config(arguments: list[str]) -> SFTConfig:
    """The configuration."""
    return load_config(SFTConfig, arguments, files=presets(arguments))


def build_job(config: SFTConfig) -> Job:
    """What runs where."""
    builder = JobBuilder().config(config).recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S)
    builder.role(Role.TRAINER).run(f"{__package__}.trainer:SFTTrainer")
    builder.role(Role.ACTOR).train(f"{__package__}.roles.actor:Actor").resource(accelerator=1)
    builder.nnodes(config.num_nodes).nproc_per_node(config.num_gpus_per_node or 1)
    return builder.build()


def check_inputs(config: SFTConfig) -> None:
    """See that model and data can be there, before any process starts."""
    for option, source, prefix in (("pretrain", config.pretrain, "new"), ("dataset", config.dataset, "task")):
        kind, _, task = source.partition(":")
        try:
            if kind == prefix:
                get_task(task)
            elif option == "dataset":
                read_records(source)
            else:
                find_model(source)
        except ValueError as error:
            raise ConfigError(f"{option}={source}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
    began = time.time()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(describe_options(SFTConfig))
        return 0
    try:
        config = read_config(arguments)
        changed = changed_options(SFTConfig, arguments, presets(arguments))
        plan = supervised_plan(RECIPE, build_job(config), config, changed, Role.ACTOR, "demonstrations")
        if plan.is_all(config, given_options(SFTConfig, arguments)):
            return 0
        check_inputs(config)
        run_dir = open_run(config.run_dir, config.resume, config.ckpt_path, plan.json())
    except (ValueError, OSError) as error:
        print(f"{RECIPE}: {error}", file=sys.stderr)
        return 2
    plan.job.config = replace(config, run_dir=str(run_dir))
    return plan.run(run_dir, began)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before there was anything to stop
        sys.exit(130)

"""From the command line to a finished run: configuration -> job -> submit."""

import sys
import time
from dataclasses import replace
from pathlib import Path

from components.launch import STOP_GRACE_S, open_run, printed, run_job, threads_each
from components.options import check_prompts
from components.tracking import redact
from components.warm_start import resolve_model
from core import ConfigError, Job, RLJobBuilder, Role, describe_options, given_options, load_config
from core.placement import detect_devices

from .config import RECIPE, ReinforceConfig

PRESET = Path(__file__).parent / "tiny.yaml"


def asked_config(arguments: list[str]) -> ReinforceConfig:
    """What the user asks for. Without a model of the user's own it starts from the tiny preset."""
    own = "model.path" in given_options(ReinforceConfig, arguments)
    return load_config(ReinforceConfig, arguments, files=[] if own else [PRESET])


def read_config(arguments: list[str]) -> ReinforceConfig:
    """The same with everything that was left to the machine filled in: precision, and how many workers a role has."""
    config = asked_config(arguments)
    gpus = detect_devices()
    rollout, _ = config.rollout.chosen(gpus, config.model.path, config.evaluation.temperature)
    placement = config.placement.resolved(gpus, config.groups, rollout.tensor_parallel)
    auto = config.train.precision == "auto"
    precision = ("bf16" if gpus else "fp32") if auto else config.train.precision
    return replace(config, rollout=rollout, placement=placement, train=replace(config.train, precision=precision))


def build_job(config: ReinforceConfig) -> Job:
    """What runs where."""
    roles, own = f"{__package__}.roles", config.placement
    actors, engines, references = own.actor_ranks or 1, own.rollout_engines or 1, own.references or 1
    # Roles that take turns may each use all cores; what works at the same time shares them.
    learners = actors if config.takes_turns or not config.needs_reference else actors + references
    builder = RLJobBuilder().config(config).node_num(own.nodes)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S)
    builder.trainer(f"{__package__}.trainer:ReinforceTrainer")
    builder.actor(f"{roles}.actor:Actor").nnodes(own.nodes).nproc_per_node(actors // own.nodes)
    builder.resource(accelerator=1, threads=threads_each(learners))
    builder.rollout(f"{roles}.rollout:Rollout").total(engines).max_restarts(config.max_restarts)
    devices = config.rollout.tensor_parallel
    builder.resource(cpu=devices, accelerator=devices, threads=threads_each(engines))
    if config.needs_reference:
        builder.reference(f"{roles}.reference:Reference").total(references).max_restarts(config.max_restarts)
        builder.resource(accelerator=1, threads=threads_each(references if config.takes_turns else learners))
    if own.collocate and detect_devices():
        builder.with_collocation(Role.ACTOR, Role.ROLLOUT, *[Role.REFERENCE] * config.needs_reference)
    return builder.build()


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
    began = time.time()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(describe_options(ReinforceConfig))
        return 0
    try:
        asked, config, given = (
            asked_config(arguments),
            read_config(arguments),
            given_options(ReinforceConfig, arguments),
        )
        job = build_job(config)
        job.check_backend(config.backend)
        plan = job.model_copy(update={"config": redact(config)}).model_dump_json(indent=2)
        if config.print_config or config.dry_run:
            print(printed(asked, given) if config.print_config else plan)
            return 0
        check_inputs(config)
        run_dir = open_run(config.run_dir, config.resume, config.checkpoint.path, plan)
    except (ValueError, OSError) as error:
        print(f"{RECIPE}: {error}", file=sys.stderr)
        return 2
    config = replace(config, run_dir=str(run_dir))
    job.config = replace(config, model=replace(config.model, path=resolve_model(config.model.path)))
    return run_job(
        job,
        recipe=RECIPE,
        run_dir=run_dir,
        seed=config.seed,
        backend=config.backend,
        began=began,
        lines=[
            f"{job.describe()}; {config.train.engine}, {config.train.precision}",
            asked.rollout.chosen(detect_devices(), asked.model.path, asked.evaluation.temperature)[1],
            *config.notes(given),
        ],
        seconds={"warm_start": time.time() - began},
    )


def check_inputs(config: ReinforceConfig) -> None:
    """See that model, prompts and reward can be there, before any process starts."""
    count = check_prompts(config.model, config.data, config.evaluation, config.reward_source, config.seed)
    if config.steps(count * config.data.passes) < 1:
        raise ConfigError(
            f"{config.data.path} gives {count} prompts, fewer than prompts_per_step={config.prompts_per_step}; lower "
            "it, or raise data.max_rows or data.passes"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before there was anything to stop
        sys.exit(130)

"""From the command line to a finished run: configuration -> job -> submit."""

import sys
import time
from dataclasses import replace
from pathlib import Path

from core import Job, RLJobBuilder, Role
from core.placement import detect_devices
from training.config import ConfigError, changed_options, describe_options, given_options, load_config
from training.launch import STOP_GRACE_S, open_run, threads_each
from training.options import check_prompts, resolved
from training.plan import Plan, policy_plan
from training.warm_start import resolve_model

from .config import RECIPE, ReinforceConfig

PRESET = Path(__file__).parent / "tiny.yaml"


def presets(arguments: list[str]) -> list[Path]:
    """What a run starts from: without a model of the user's own the tiny preset."""
    return [] if "model.path" in given_options(ReinforceConfig, arguments) else [PRESET]


def read_config(arguments: list[str]) -> ReinforceConfig:
    """What the user asks for, with everything filled in that was left to the machine."""
    return resolved(load_config(ReinforceConfig, arguments, files=presets(arguments)), detect_devices())


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


def make_plan(asked: ReinforceConfig, arguments: list[str]) -> Plan:
    """What the run will use, and why."""
    config = resolved(asked, detect_devices())
    changed = changed_options(ReinforceConfig, arguments, presets(arguments))
    return policy_plan(RECIPE, build_job(config), asked, config, changed, given_options(ReinforceConfig, arguments))


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
    began = time.time()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(describe_options(ReinforceConfig))
        return 0
    try:
        asked = load_config(ReinforceConfig, arguments, files=presets(arguments))
        plan = make_plan(asked, arguments)
        if plan.is_all(asked, given_options(ReinforceConfig, arguments)):
            return 0
        config = plan.config
        plan.steps = config.arithmetic(check_inputs(config))
        run_dir = open_run(config.run_dir, config.resume, config.checkpoint.path, plan.json())
    except (ValueError, OSError) as error:
        print(f"{RECIPE}: {error}", file=sys.stderr)
        return 2
    config = replace(config, run_dir=str(run_dir))
    plan.job.config = replace(config, model=replace(config.model, path=resolve_model(config.model.path)))
    return plan.run(run_dir, began, warm_start=time.time() - began)


def check_inputs(config: ReinforceConfig) -> int:
    """See that model, prompts and reward can be there, before any process starts; how many prompts there are."""
    count = check_prompts(config.model, config.data, config.evaluation, config.reward_source, config.seed)
    if config.steps(count * config.data.passes) < 1:
        raise ConfigError(
            f"{config.data.path} gives {count} prompts, fewer than prompts_per_step={config.prompts_per_step}; lower "
            "it, or raise data.max_rows or data.passes"
        )
    return count


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before there was anything to stop
        sys.exit(130)

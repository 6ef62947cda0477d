"""From the command line to a finished run: configuration -> job -> submit."""

import copy
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from components.launch import STOP_GRACE_S, open_run, printed, run_job, threads_each
from components.tracking import redact
from components.warm_start import resolve_model
from core import ConfigError, Job, JobBuilder, describe_options, given_options, load_config
from core.placement import detect_devices

from .config import RECIPE, VerlPPOConfig, idle_notes, plain_arguments, renamed
from .data import check_inputs
from .resource_pool import POLICY_ROLES, Role

PRESET = Path(__file__).parent / "tiny.yaml"
LEARNERS = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.Critic)
"""Roles whose processes enter collectives together."""


def role_worker_mapping(config: VerlPPOConfig) -> Mapping[str, str]:  # noqa: ARG001 (for yours to look at)
    """What each role runs. Put workers of your own in here; trainer.role_mapping gives a role of your own its pool."""
    policy = f"{__package__}.roles.actor_rollout_ref:ActorRolloutRefWorker"
    return {
        **{str(role): policy for role in POLICY_ROLES},
        Role.Critic: f"{__package__}.roles.critic:CriticWorker",
        Role.RewardModel: f"{__package__}.roles.reward_model:RewardModelWorker",
    }


def asked_config(arguments: list[str]) -> VerlPPOConfig:
    """What the user asks for. Without a model of the user's own it starts from the tiny preset."""
    own = "actor_rollout_ref.model.path" in given_options(VerlPPOConfig, arguments)
    return load_config(VerlPPOConfig, arguments, files=[] if own else [PRESET])


def resolved(asked: VerlPPOConfig) -> tuple[VerlPPOConfig, str]:
    """The same with everything filled in that was left to the machine; and who generates, and why, in a line."""
    gpus, config = detect_devices(), copy.deepcopy(asked)
    own, trainer = config.actor_rollout_ref, config.trainer
    try:
        rollout, engine = asked.rollout.chosen(gpus, own.model.path, 0.0, 1.0, asked.val_temperature)
    except ValueError as error:
        raise ConfigError(renamed(str(error))) from error
    own.rollout.name, own.rollout.free_cache_engine = rollout.engine, own.rollout.free_cache_engine and gpus > 0
    trainer.n_gpus_per_node = trainer.n_gpus_per_node or max(gpus, 1)
    for shards in (own.actor.fsdp_config, config.critic.model.fsdp_config):
        shards.choose(gpus)
    cores, pools = len(os.sched_getaffinity(0)), config.pools
    most = max(pools.workers(role) // pools.nodes(role) for role in pools.mapping)
    # On a cluster the machine at hand says nothing; Ray refuses there what does not fit.
    if not gpus and most > cores and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"{most} processes of a role on this machine, which has no GPU and {cores} CPU cores, one for each; set "
            f"trainer.n_gpus_per_node (or trainer.resource_pool_spec) to at most {cores}"
        )
    return replace(config), engine


def build_job(config: VerlPPOConfig) -> Job:
    """What runs where."""
    pools, workers, trainer = config.pools, role_worker_mapping(config), config.trainer
    builder = JobBuilder().config(config).node_num(trainer.nnodes)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S)
    builder.role("trainer").run(f"{__package__}.trainer:VerlPPOTrainer")
    for role, pool in pools.mapping.items():
        if role not in workers:
            raise ConfigError(f"trainer.role_mapping has {role}, but role_worker_mapping of main.py does not; add it")
        builder.role(role)
        devices = config.rollout.tensor_parallel if role == config.rollout_role else 1
        count = pools.workers(role) // devices
        if role in LEARNERS:
            builder.train(workers[role]).nnodes(pools.nodes(role)).nproc_per_node(count // pools.nodes(role))
        else:
            builder.run(workers[role]).total(count).max_restarts(config.max_restarts)
        # Roles take turns, each with all cores, but where generation is ahead of training.
        threads = threads_each(pools.get_n_gpus() if config.asynchronous.ahead else count)
        builder.resource(cpu=devices, accelerator=devices, threads=threads)
        if trainer.share_processes:
            builder.process(pool)
    for pool in pools.resource_pool_spec:
        roles = pools.roles_of(pool)
        if len(roles) > 1 and (detect_devices() or trainer.share_processes):
            builder.with_collocation(*roles)
    return builder.build()


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
    began = time.time()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(describe_options(VerlPPOConfig))
        return 0
    try:
        arguments = plain_arguments(arguments)
        asked, given = asked_config(arguments), given_options(VerlPPOConfig, arguments)
        config, engine = resolved(asked)
        notes = [*config.notes(given), *idle_notes(arguments)]
        job = build_job(config)
        job.check_backend(config.backend)
        plan = job.model_copy(update={"config": redact(config)}).model_dump_json(indent=2)
        if config.print_config or config.dry_run:
            print(printed(asked, given) if config.print_config else plan)
            print("".join(f"{RECIPE}: {note}\n" for note in notes), end="", file=sys.stderr)
            return 0
        check_inputs(config)
        run_dir = open_run(config.run_dir, config.resume_from, config.trainer.default_local_dir, plan)
    except (ValueError, OSError) as error:
        print(f"{RECIPE}: {error}", file=sys.stderr)
        return 2
    job.config = config = replace(config, run_dir=str(run_dir))
    config.actor_rollout_ref.model.path = resolve_model(config.actor_rollout_ref.model.path)
    return run_job(
        job,
        recipe=RECIPE,
        run_dir=run_dir,
        seed=config.seed,
        backend=config.backend,
        began=began,
        lines=[f"{job.describe()}; fsdp, {config.dtype}", engine, *notes],
        seconds={"warm_start": time.time() - began},
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before there was anything to stop
        sys.exit(130)

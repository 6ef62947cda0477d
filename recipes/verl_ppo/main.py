"""From the command line to a finished run: configuration -> job -> submit."""

import copy
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from core import Job, JobBuilder
from core.placement import detect_devices
from training.config import ConfigError, changed_options, describe_options, given_options, load_config
from training.launch import STOP_GRACE_S, open_run, threads_each
from training.plan import Plan, steps_text
from training.warm_start import resolve_model

from .config import RECIPE, VerlPPOConfig, as_list, idle_notes, plain_arguments, renamed
from .data import check_inputs
from .layout import memory_needs
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


def presets(arguments: list[str]) -> list[Path]:
    """What a run starts from: without a model of the user's own the tiny preset."""
    return [] if "actor_rollout_ref.model.path" in given_options(VerlPPOConfig, arguments) else [PRESET]


def asked_config(arguments: list[str]) -> VerlPPOConfig:
    """What the user asks for."""
    return load_config(VerlPPOConfig, arguments, files=presets(arguments))


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


def make_plan(asked: VerlPPOConfig, arguments: list[str]) -> Plan:
    """What the run will use, and why."""
    (config, engine), data = resolved(asked), asked.data
    job = build_job(config)
    return Plan(
        recipe=RECIPE,
        job=job,
        config=config,
        changed=changed_options(VerlPPOConfig, arguments, presets(arguments)),
        needs=memory_needs(config, job),
        steps=steps_text(
            config.arithmetic, ",".join(as_list(data.train_files)), max(data.train_max_samples, 0) or None
        ),
        choices=[f"fsdp, {config.dtype}", engine],
        notes=[*config.notes(given_options(VerlPPOConfig, arguments)), *idle_notes(arguments)],
        overlaps=config.asynchronous.ahead > 0,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
    began = time.time()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(describe_options(VerlPPOConfig))
        return 0
    try:
        arguments = plain_arguments(arguments)
        asked = asked_config(arguments)
        plan = make_plan(asked, arguments)
        if plan.is_all(asked, given_options(VerlPPOConfig, arguments)):
            return 0
        plan.steps = plan.config.arithmetic(check_inputs(plan.config))
        run_dir = open_run(asked.run_dir, asked.resume_from, asked.trainer.default_local_dir, plan.json())
    except (ValueError, OSError) as error:
        print(f"{RECIPE}: {error}", file=sys.stderr)
        return 2
    plan.job.config = config = replace(plan.config, run_dir=str(run_dir))
    config.actor_rollout_ref.model.path = resolve_model(config.actor_rollout_ref.model.path)
    return plan.run(run_dir, began, warm_start=time.time() - began)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before there was anything to stop
        sys.exit(130)

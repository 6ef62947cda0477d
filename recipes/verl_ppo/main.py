"""From the command line to a finished run: configuration -> job -> submit."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from core import Job, JobBuilder
from core.placement import detect_devices
from training.command import Command
from training.launch import STOP_GRACE_S, threads_each
from training.machines import cores_here
from training.plan import Plan, steps_text
from training.schema import ConfigError
from training.warm_start import resolve_model

from .config import VerlPPOConfig, idle_notes, plain_arguments
from .data import check_inputs
from .keys import refuse, renamed
from .layout import memory_needs
from .resource_pool import POLICY_ROLES, Role

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


def resolved(asked: VerlPPOConfig) -> tuple[VerlPPOConfig, str]:
    """The same with everything filled in that was left to the machine; and who generates, and why, in a line."""
    gpus, config = detect_devices(), copy.deepcopy(asked)
    own, trainer = config.actor_rollout_ref, config.trainer
    try:
        rollout, engine = asked.rollout.chosen(gpus, own.model.path, 0.0, 1.0, asked.val_temperature)
    except ValueError as error:
        raise ConfigError(renamed(str(error))) from error
    own.rollout.name = rollout.engine
    own.rollout.free_cache_engine = own.rollout.free_cache_engine and gpus > 0
    trainer.n_gpus_per_node = trainer.n_gpus_per_node or max(gpus, 1)
    for shards in (own.actor.fsdp_config, config.critic.model.fsdp_config):
        shards.choose(gpus)
    cores, pools = cores_here(), config.pools
    most = max(pools.workers(role) // pools.nodes(role) for role in pools.mapping)
    # On a cluster the machine at hand says nothing; Ray refuses there what does not fit.
    too_many = not gpus and cores is not None and most > cores
    refuse({"cores": too_many}, most=most, cores=cores)
    return replace(config), engine


def build_job(config: VerlPPOConfig) -> Job:
    """What runs where."""
    pools, workers, trainer = config.pools, role_worker_mapping(config), config.trainer
    builder = JobBuilder().config(config).node_num(trainer.nnodes)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S, config.placement_timeout)
    builder.role("trainer").run(f"{__package__}.trainer:VerlPPOTrainer")
    for role, pool in pools.mapping.items():
        refuse({"no_worker": role not in workers}, role=role)
        builder.role(role)
        devices = config.rollout.tensor_parallel if role == config.rollout_role else 1
        count = pools.workers(role) // devices
        if role in LEARNERS:
            builder.train(workers[role]).nnodes(pools.nodes(role)).nproc_per_node(count // pools.nodes(role))
        else:
            builder.run(workers[role]).total(count).max_restarts(config.max_restarts)
        # Roles work one after the other, each with all cores, but where generation is ahead of training.
        threads = threads_each(pools.get_n_gpus() if config.asynchronous.ahead else count)
        builder.resource(cpu=devices, accelerator=devices, threads=threads)
        if trainer.share_processes:
            builder.process(pool)
    for pool in pools.resource_pool_spec:
        roles = pools.roles_of(pool)
        if len(roles) > 1 and (detect_devices() or trainer.share_processes):
            builder.with_collocation(*roles)
    return builder.build()


class VerlCommand(Command[VerlPPOConfig]):
    """See `Command`."""

    models = frozenset({"actor_rollout_ref.model.path"})

    def words(self, arguments: list[str]) -> list[str]:
        """Hydra's way of writing as that of `load_config`."""
        return plain_arguments(arguments)

    def plan(self, asked: VerlPPOConfig, arguments: list[str]) -> Plan:
        """See `Command.plan`."""
        (config, engine), data = resolved(asked), asked.data
        job = build_job(config)
        return Plan(
            recipe=self.folder.name,
            job=job,
            config=config,
            changed=self.changed(arguments),
            needs=memory_needs(config, job),
            steps=steps_text(config.arithmetic, ",".join(data.train_files), max(data.train_max_samples, 0) or None),
            choices=[f"fsdp, {config.dtype}", engine],
            notes=[*config.notes(self.given(arguments)), *idle_notes(arguments)],
            overlaps=config.asynchronous.ahead > 0,
        )

    def check(self, plan: Plan) -> None:
        """See `Command.check`."""
        plan.steps = plan.config.arithmetic(check_inputs(plan.config))

    def checkpoints(self, config: VerlPPOConfig) -> str | None:
        """See `Command.checkpoints`."""
        return config.trainer.default_local_dir

    def ready(self, config: VerlPPOConfig) -> VerlPPOConfig:
        """See `Command.ready`."""
        model = config.actor_rollout_ref.model
        model.path = resolve_model(model.path)
        return config


COMMAND = VerlCommand(VerlPPOConfig, Path(__file__).parent)
main = COMMAND.main


def read_config(arguments: list[str]) -> VerlPPOConfig:
    """What a command line asks for, with everything filled in that was left to the machine."""
    return resolved(COMMAND.read(COMMAND.words(arguments)))[0]


if __name__ == "__main__":
    COMMAND.run()

"""From the command line to a finished run: configuration -> job -> submit."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from core import Job, JobBuilder
from core.placement import detect_devices
from training.launch.launch import STOP_GRACE_S, threads_each
from training.launch.model_use import ModelUse
from training.launch.plan import Plan
from training.launch.policy_command import PolicyCommand
from training.options.schema import ConfigError

from .adapter import plain_arguments
from .config import VerlPPOConfig
from .data import check_inputs
from .resource_pool import POLICY_ROLES

LEARNERS = ("actor", "actor_rollout", "actor_rollout_ref", "critic")
"""Roles whose processes run collectives together."""


FROZEN = ("ref", "rm")
"""Roles whose processes run collectives together if their model is sharded."""


def role_worker_mapping(config: VerlPPOConfig) -> Mapping[str, str]:
    """Return the worker class of each role. Add your own workers here, and their roles to placement.role_pools."""
    # A pass of a sharded model is collective: all its processes have to run it together, so they are ranks.
    sharded = config.frozen_engine.is_collective
    policy = "Rank" if sharded or config.is_own_reference else "Worker"
    return {
        **dict.fromkeys(POLICY_ROLES, f"{__package__}.roles.actor_rollout_ref:ActorRolloutRef{policy}"),
        "critic": f"{__package__}.roles.critic:CriticWorker",
        "rm": f"{__package__}.roles.reward_model:RewardModel{'Rank' if sharded else 'Worker'}",
    }


def build_job(
    config: VerlPPOConfig,
    workers: Mapping[str, str] | None = None,
    trainer: str = f"{__package__}.trainer:VerlPPOTrainer",
) -> Job:
    """Build the job: the processes of each role, and their placement.

    Args:
        config: resolved configuration.
        workers: entry point of each role. None: those of `role_worker_mapping`.
        trainer: entry point of the trainer.

    Raises:
        ConfigError: a role has no worker class.
    """
    placement = config.placement
    workers = role_worker_mapping(config) if workers is None else workers
    builder = JobBuilder().config(config).node_num(placement.nodes)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S, config.placement_timeout)
    builder.role("trainer").run(trainer)
    for role in config.roles:
        if role not in workers:
            raise ConfigError(f"placement.role_pools has {role}, but role_worker_mapping of main.py does not; add it")
        builder.role(role)
        devices = 1
        if role == "rollout":
            devices = config.rollout.tensor_parallel
        count = placement.workers(role) // devices
        if role in LEARNERS or (role in FROZEN and config.frozen_engine.is_collective):
            nodes = placement.nodes_of(role)
            builder.train(workers[role]).nnodes(nodes).nproc_per_node(count // nodes)
        else:
            builder.run(workers[role]).total(count).max_restarts(config.max_restarts)
        # Roles run one after the other and can use all cores. With generation ahead of training they run concurrently
        # and have to share the cores.
        processes = sum(sum(counts) for counts in placement.pools.values())
        threads = threads_each(processes if config.asynchronous.ahead else count, placement.nodes)
        builder.resource(cpu=devices, accelerator=devices, threads=threads)
        # A process has the devices of one rank, which is too little for an engine with several.
        if placement.share_processes and devices == 1:
            builder.process(placement.mapping[role])
    for pool in placement.pools:
        roles = [role for role in placement.roles_of(pool) if role in config.roles]
        # On CPUs there are no devices to share, and collocation would only restrict where processes can run.
        if len(roles) > 1 and (detect_devices() or placement.share_processes):
            builder.with_collocation(*roles)
    return builder.build()


class VerlCommand(PolicyCommand[VerlPPOConfig]):
    """See `PolicyCommand`."""

    is_adapted = True

    def words(self, arguments: list[str]) -> list[str]:
        """Convert Hydra's syntax to that of `load_config`."""
        return plain_arguments(super().words(arguments))

    def resolved(self, requested: VerlPPOConfig) -> VerlPPOConfig:
        """See `PolicyCommand.resolved`. bfloat16 is used on GPUs only."""
        config = super().resolved(requested)
        chosen = {"auto": "fp32", "bf16_autocast": "fp32"}
        if detect_devices() > 0:
            chosen = {"auto": "bf16"}
        learners = (config.train, config.critic)
        train, critic = (replace(each, precision=chosen.get(each.precision, each.precision)) for each in learners)
        return replace(config, train=train, critic=critic)

    def model_uses(self, config: VerlPPOConfig, job: Job) -> list[ModelUse]:
        """See `PolicyCommand.model_uses`. The name of a role lists the parts of the policy that its processes hold."""
        uses = list[ModelUse]()
        for role in job.placement.processes:
            models = self._models_by_part(config, role)
            uses += [models[part] for part in role.lower().split("_") if part in models]
        return uses

    def _models_by_part(self, config: VerlPPOConfig, role: str) -> dict[str, ModelUse]:
        """Return the model of each part that the name of a role may contain."""
        policy, size, sleeps = config.model.path, config.step_size, config.placement.learners_sleep
        models = {
            "actor": ModelUse(
                role=role,
                path=policy,
                config=config.train_engine(1),
                sequences=config.mini_batch_size,
                publishes=True,
                sleeps=sleeps,
            ),
            "rollout": ModelUse(role=role, path=policy, config=config.rollout_engine(), sequences=size),
            "critic": ModelUse(
                role=role,
                path=config.critic.path or policy,
                config=config.engine("critic", 1),
                sequences=config.size_of("critic"),
                has_head=False,
                sleeps=sleeps,
            ),
            "rm": ModelUse(
                role=role, path=config.reward.model_path, config=config.reward_engine, sequences=size, has_head=False
            ),
        }
        if config.has_reference_role:
            reference = config.algorithm.reference_path or policy
            models["ref"] = ModelUse(role=role, path=reference, config=config.frozen_engine, sequences=size)
        return models

    def models(self, config: VerlPPOConfig) -> dict[str, str]:
        """See `Command.models`."""
        others = {
            "critic.path": config.critic.path if config.needs_critic else "",
            "reward.model_path": config.reward.model_path,
            "algorithm.reference_path": config.algorithm.reference_path if config.needs_reference else "",
        }
        return super().models(config) | {option: path for option, path in others.items() if path}

    def rows(self, config: VerlPPOConfig) -> list[dict[str, Any]]:
        """See `PolicyCommand.rows`."""
        return config.rows()

    def count_prompts(self, plan: Plan, notes: list[str]) -> int:
        """See `PolicyCommand.count_prompts`."""
        return check_inputs(plan.config, notes, plan.absent)


COMMAND = VerlCommand(VerlPPOConfig, Path(__file__).parent, build_job)
read_config = COMMAND.read_resolved
main = COMMAND.main

if __name__ == "__main__":
    COMMAND.run()

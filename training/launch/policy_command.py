"""The command line of a recipe that trains a policy on its own rollouts, and the job that it runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from components.models.size import model_size
from core import Job, JobBuilder, RLJobBuilder, Role
from core.placement import detect_devices
from training.launch.command import Command
from training.launch.inputs import check_prompts, resolved
from training.launch.launch import STOP_GRACE_S, threads_each
from training.launch.model_use import ModelUse
from training.launch.plan import Plan, attention_notes
from training.launch.row_counts import steps_text
from training.options.config import CommandLine
from training.options.model_options import ModelOptions
from training.options.rl_options import RLOptions
from training.options.schema import ConfigError
from training.run.prompts import describe_prompts

C = TypeVar("C", bound=RLOptions)

FIRST_ROWS = 100
"""Number of rows that a dry run reads for the first prompt."""
REFERENCE = "training.roles.reference"


def policy_job(
    config: RLOptions,
    *,
    trainer: str,
    actor: str,
    rollout: str = "training.roles.rollout:RolloutWorker",
    reference: tuple[str, str] = (f"{REFERENCE}:ReferenceWorker", f"{REFERENCE}:ReferenceRank"),
) -> RLJobBuilder:
    """Return the builder of a job that trains a policy. Further roles may be added before `build()`.

    Args:
        config: options with all numbers of workers resolved.
        trainer: class of the trainer, as `package.module:Class`.
        actor: class of the ranks that train the policy.
        rollout: class of the engines that sample.
        reference: classes of the frozen policy, as for `frozen_role`. It is started if there is a KL penalty.
    """
    placement = config.placement
    actors = placement.actor_ranks or 1
    engines = placement.rollout_engines or 1
    references = placement.references or 1
    # Colocated roles work one after the other, so each may use all cores. Other roles have to share them.
    learners = actors if placement.colocate or not config.has_reference_role else actors + references
    builder = RLJobBuilder().config(config).node_num(placement.nodes)
    gpus = detect_devices()
    if gpus:
        builder.device_per_node(placement.devices_per_node or gpus)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S, config.placement_timeout)
    builder.trainer(trainer)
    spread = placement.actor_nodes or placement.nodes
    builder.actor(actor).nnodes(spread).nproc_per_node(actors // spread)
    builder.resource(accelerator=1, threads=threads_each(learners, spread))
    builder.rollout(rollout).total(engines).max_restarts(config.max_restarts)
    devices = config.rollout.tensor_parallel
    builder.resource(cpu=devices, accelerator=devices, threads=threads_each(engines, min(engines, placement.nodes)))
    colocated: list[str] = [Role.ACTOR, Role.ROLLOUT]
    if config.has_reference_role:
        # The nodes that the actor leaves free, or all nodes if it uses all of them.
        nodes = placement.nodes - spread or placement.nodes
        frozen_role(builder, Role.REFERENCE, reference, references, nodes, config)
        sharing = references if placement.colocate else learners
        builder.resource(accelerator=1, threads=threads_each(sharing, placement.nodes))
        colocated.append(Role.REFERENCE)
    if placement.colocate and gpus:
        builder.with_collocation(*colocated)
    return builder


def frozen_role(
    builder: JobBuilder, role: str, classes: tuple[str, str], count: int, nodes: int, config: RLOptions
) -> None:
    """Add a role of a frozen model: independent instances, or the ranks of one sharded model.

    Args:
        builder: builder of the job.
        role: name of the role.
        classes: class of an instance and class of a rank, as `package.module:Class`.
        count: number of workers.
        nodes: number of nodes to spread ranks over, as far as their number is divisible.
        config: options of the run.
    """
    instance, rank = classes
    builder.role(role)
    if config.placement.frozen_models == "whole":
        builder.run(instance).total(count).max_restarts(config.max_restarts)
        return
    # Every machine has to get the same number of ranks, so some machines may stay without any.
    machines = math.gcd(count, nodes)
    builder.train(rank).nnodes(machines).nproc_per_node(count // machines)


class PolicyCommand(Command[C]):
    """The command of a recipe that trains a policy on its own rollouts."""

    DATA = "prompts"

    def read_resolved(self, arguments: list[str]) -> C:
        """Return the requested configuration with all automatic values resolved."""
        return self.resolved(self.read(arguments))

    def resolved(self, requested: C) -> C:
        """Resolve the automatic values of a configuration."""
        return resolved(requested, detect_devices())

    def idle_presets(self, line: CommandLine[C]) -> dict[str, str]:
        """See `Command.idle_presets`."""
        # The written value is compared, because the configuration is checked only after the preset was applied.
        if not line.is_on("asynchronous.enabled"):
            return {}
        return {"placement.learners_sleep": "asynchronous.enabled lets learners work while responses are generated"}

    def plan(self, requested: C, line: CommandLine[C]) -> Plan:
        """See `Command.plan`."""
        config = self.resolved(requested)
        job = self.build_job(config)
        # In the environment, because reward code runs in processes that do not get the options.
        if config.sandbox == "unsafe":
            job.global_env["TROUPE_SANDBOX"] = "unsafe"
        data, train = config.data, config.train
        kernels = config.model.attn_implementation
        attention = f", attention {kernels}" if kernels else ""
        temperature = requested.evaluation.temperature
        on_gpu = job.device_type == "GPU"
        _, generates = requested.rollout.chosen(on_gpu, requested.model.path, temperature, lora_rank=train.lora_rank)
        arguments = config.engine_arguments().notes(on_gpu) if config.rollout.vllm else []
        return Plan(
            recipe=self.folder.name,
            job=job,
            config=config,
            changed=line.changed,
            models=self.model_uses(config, job),
            longest=longest_sequence(config),
            steps=steps_text(config.arithmetic, data.path, data.max_samples, data.probs),
            choices=[
                f"{train.engine} zero_stage={config.train_engine(1).stage} {train.precision}{attention}",
                generates,
                f"weights by {requested.weight_sync(on_gpu)[1]}",
            ],
            notes=config.notes(line.named) + attention_notes(requested.model.attn_implementation) + arguments,
            overlaps=config.asynchronous.ahead > 0,
        )

    def model_uses(self, config: C, job: Job) -> list[ModelUse]:  # noqa: ARG002 - for a subclass
        """Return the models that the roles of the job hold."""
        path = config.model.path
        return [
            ModelUse(
                role=Role.ACTOR,
                path=path,
                config=config.train_engine(1),
                sequences=config.mini_batch_size,
                publishes=True,
                sleeps=config.placement.learners_sleep,
            ),
            ModelUse(role=Role.ROLLOUT, path=path, config=config.rollout_engine(), sequences=config.step_size),
            ModelUse(role=Role.REFERENCE, path=path, config=config.frozen_engine, sequences=config.step_size),
        ]

    def models(self, config: C) -> dict[str, str]:
        """See `Command.models`."""
        return {"model.path": config.model.path}

    def rows(self, config: C) -> list[dict[str, Any]]:
        """Read the rows of the prompts to train on."""
        return config.data.rows(config.seed)

    def first_example(self, config: C) -> list[str]:
        """See `Command.first_example`. It shows the first row of the data; a run may shuffle the rows."""
        rows = self.rows(config)[:FIRST_ROWS]
        return describe_prompts(config.data, config.data.source(rows, config.model.tokenizer(), config.seed, False))

    def count_prompts(self, plan: Plan, notes: list[str]) -> int:
        """Return the number of rows to train on; see `check_prompts`."""
        config: C = plan.config
        most = None if config.agent.func_path else config.rollout.max_new_tokens
        return check_prompts(
            config.model,
            config.data,
            config.evaluation,
            config.reward_source,
            config.seed,
            config.reward.settings(),
            most,
            notes,
            encodes="model.path" not in plan.absent,
            calls_servers=not config.dry_run,
            agent=config.agent,
        )

    def check(self, plan: Plan) -> None:
        """Check model, prompts and reward, and count the prompts."""
        config = plan.config
        notes: list[str] = []
        count = self.count_prompts(plan, notes)
        plan.notes = [*plan.notes, *notes]
        plan.steps = config.arithmetic(count)
        plan.step_count = steps = config.steps(count * config.data.epochs)
        if steps < 1:
            raise ConfigError(
                f"{config.data.path} gives {count} prompts, fewer than prompts_per_step={config.prompts_per_step}; "
                "lower it, or raise data.max_samples or data.epochs"
            )
        _check_positions(config)

    def exported(self, config: C) -> ModelOptions:
        """See `Command.exported`."""
        return config.model

    def ready(self, config: C) -> C:
        """See `Command.ready`. The model of the demonstration is created if it does not exist."""
        return replace(config, model=config.model.prepared(Path(config.run_dir)))


def longest_sequence(config: RLOptions) -> int:
    """Return the maximum number of tokens of a prompt, or of an episode, with its response."""
    most_prompt = config.data.max_prompt_tokens
    most_new = config.rollout.max_new_tokens
    read = config.agent.longest_prompt(most_prompt, most_new)
    size = model_size(config.model.path)
    # 0 and None are limits that are not known.
    limits = (read and read + most_new, size and size.positions)
    return min(filter(None, limits), default=most_prompt + most_new)


def _check_positions(config: RLOptions) -> None:
    """Raise ConfigError if a response alone exceeds the positions of the model. `check_prompts` checks the prompts."""
    size = model_size(config.model.path)
    most = config.rollout.max_new_tokens
    if not config.agent.func_path and size is not None and 0 < size.positions <= most:
        raise ConfigError(
            f"rollout.max_new_tokens={most}, but model.path={config.model.path} has only {size.positions} positions "
            "for prompt and response together; lower rollout.max_new_tokens"
        )

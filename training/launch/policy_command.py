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
from training.launch.inputs import CHECKED_ROWS, check_prompts, data_tokenizer, resolved
from training.launch.launch import STOP_GRACE_S, threads_each
from training.launch.model_use import ModelUse
from training.launch.plan import Plan, attention_notes
from training.launch.row_counts import steps_text
from training.options.adapter import as_text
from training.options.config import CommandLine
from training.options.model_options import ModelOptions
from training.options.rl_options import RLOptions
from training.options.schema import ConfigError
from training.run.continuation import (
    GROUPS,
    Continued,
    check_seed,
    check_trained_model,
    no_state_of,
    other_data,
    unfinished_groups,
)
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
    """What runs where; further roles may be added before `build()`.

    Args:
        config: with every number of workers filled in.
        trainer: the class of each role, as `package.module:Class`.
        actor: the ranks that train the policy.
        rollout: the engines that sample.
        reference: the frozen policy, started where there is a KL; as `frozen_role` takes it.
    """
    own = config.placement
    actors, engines, references = own.actor_ranks or 1, own.rollout_engines or 1, own.references or 1
    # Colocated roles work one after the other, and may each use all cores; others share them.
    learners = actors if own.colocate or not config.has_reference_role else actors + references
    builder = RLJobBuilder().config(config).node_num(own.nodes)
    gpus = detect_devices()
    if gpus:
        builder.device_per_node(own.devices_per_node or gpus)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S, config.placement_timeout)
    builder.trainer(trainer)
    spread = own.actor_nodes or own.nodes
    builder.actor(actor).nnodes(spread).nproc_per_node(actors // spread)
    builder.resource(accelerator=1, threads=threads_each(learners, spread))
    builder.rollout(rollout).total(engines).max_restarts(config.max_restarts)
    devices = config.rollout.tensor_parallel
    builder.resource(cpu=devices, accelerator=devices, threads=threads_each(engines, min(engines, own.nodes)))
    colocated: list[str] = [Role.ACTOR, Role.ROLLOUT]
    if config.has_reference_role:
        nodes = spread if spread == own.nodes else own.nodes - spread
        frozen_role(builder, Role.REFERENCE, reference, references, nodes, config)
        builder.resource(accelerator=1, threads=threads_each(references if own.colocate else learners, own.nodes))
        colocated.append(Role.REFERENCE)
    if own.colocate and gpus:
        builder.with_collocation(*colocated)
    return builder


def frozen_role(
    builder: JobBuilder, role: str, classes: tuple[str, str], count: int, nodes: int, config: RLOptions
) -> None:
    """Open a role of models that are not trained: of instances, or where these are sharded, of ranks that meet.

    Args:
        builder: of the job.
        role: its name.
        classes: of an instance and of a rank, as `package.module:Class`.
        count: of its workers.
        nodes: that ranks are spread over, as far as their number allows.
        config: of the run.
    """
    instance, rank = classes
    builder.role(role)
    if config.placement.frozen_models == "whole":
        builder.run(instance).total(count).max_restarts(config.max_restarts)
        return
    machines = math.gcd(count, nodes)
    builder.train(rank).nnodes(machines).nproc_per_node(count // machines)


class PolicyCommand(Command[C]):
    """See `Command`."""

    def read_resolved(self, arguments: list[str]) -> C:
        """What the user asks for, with everything filled in that was left to the machine."""
        return self.resolved(self.read(arguments))

    def resolved(self, asked: C) -> C:
        """A configuration with everything filled in that was left to the machine."""
        return resolved(asked, detect_devices())

    def idle_presets(self, line: CommandLine[C]) -> dict[str, str]:
        """See `Command.idle_presets`."""
        if as_text(line.value("asynchronous.enabled")) not in ("true", "yes", "on", "1"):
            return {}
        return {"placement.learners_sleep": "asynchronous.enabled lets learners work while responses are generated"}

    def plan(self, asked: C, line: CommandLine[C]) -> Plan:
        """See `Command.plan`."""
        config = self.resolved(asked)
        job = self.build_job(config)
        job.global_env |= {"TROUPE_SANDBOX": "unsafe"} if config.sandbox == "unsafe" else {}
        data, train = config.data, config.train
        kernels = config.model.attn_implementation
        attention = f", attention {kernels}" if kernels else ""
        temperature = asked.evaluation.temperature
        on_gpu, rank = job.device_type == "GPU", train.lora_rank
        _, generates = asked.rollout.chosen(on_gpu, asked.model.path, temperature, lora_rank=rank)
        return Plan(
            recipe=self.folder.name,
            job=job,
            config=config,
            changed=line.changed(),
            models=self.model_uses(config, job),
            longest=longest_sequence(config),
            steps=steps_text(config.arithmetic, data.path, data.max_samples, data.probs),
            choices=[
                f"{train.engine} zero_stage={config.train_engine(1).stage} {train.precision}{attention}",
                generates,
                f"weights by {asked.weight_sync(on_gpu)[1]}",
            ],
            notes=config.notes(line.named) + attention_notes(asked.model.attn_implementation),
            overlaps=config.asynchronous.ahead > 0,
        )

    def model_uses(self, config: C, job: Job) -> list[ModelUse]:  # noqa: ARG002 - for a subclass
        """Return the models that the roles of the job hold."""
        model, size, sleeps = config.model.path, config.step_size, config.placement.learners_sleep
        return [
            ModelUse(
                role=Role.ACTOR,
                path=model,
                config=config.train_engine(1),
                sequences=config.mini_batch_size,
                publishes=True,
                sleeps=sleeps,
            ),
            ModelUse(role=Role.ROLLOUT, path=model, config=config.rollout_engine(), sequences=size),
            ModelUse(role=Role.REFERENCE, path=model, config=config.frozen_engine, sequences=size),
        ]

    def models(self, config: C) -> dict[str, str]:
        """See `Command.models`."""
        return {"model.path": config.model.path}

    def rows(self, config: C) -> list[dict[str, Any]]:
        """Read the rows of the prompts to train on."""
        return config.data.rows(config.seed)

    def first_example(self, config: C) -> list[str]:
        """See `Command.first_example`; it is that of the first row of the data, which a run may shuffle."""
        rows = self.rows(config)[:FIRST_ROWS]
        return describe_prompts(config.data, config.data.source(rows, config.model.tokenizer(), config.seed, False))

    def count_prompts(self, plan: Plan, notes: list[str]) -> int:
        """Return the number of rows to train on; see `check_prompts`."""
        own: C = plan.config
        most = None if own.agent.func_path else own.rollout.max_new_tokens
        reward, settings = own.reward_source, own.reward.settings()
        encodes = "model.path" not in plan.absent
        return check_prompts(
            own.model,
            own.data,
            own.evaluation,
            reward,
            own.seed,
            settings,
            most,
            notes,
            encodes=encodes,
            calls_servers=not own.dry_run,
            agent=own.agent,
        )

    def check(self, plan: Plan) -> None:
        """See that model, prompts and reward can be there, and count the prompts."""
        config = plan.config
        notes: list[str] = []
        count = self.count_prompts(plan, notes)
        plan.notes = [*plan.notes, *notes]
        plan.steps = config.arithmetic(count)
        steps = config.steps(count * config.data.epochs)
        plan.step_count = steps
        if steps < 1:
            raise ConfigError(
                f"{config.data.path} gives {count} prompts, fewer than prompts_per_step={config.prompts_per_step}; "
                "lower it, or raise data.max_samples or data.epochs"
            )
        _check_positions(config)

    def exported(self, config: C) -> ModelOptions:
        """See `Command.exported`."""
        return config.model

    def check_continued(self, plan: Plan, continued: Continued) -> None:
        """See `Command.check_continued`."""
        config, saved = plan.config, continued.state.get("prompts")
        if not saved:
            raise no_state_of(continued, "prompts")
        check_seed(continued, config, saved)
        if not config.model.config_overrides:
            check_trained_model(continued, config.model.path, "model.path", config.train.lora_rank)
        if Role.CRITIC in plan.job.roles and not (continued.folder / "state" / "critic").is_dir():
            raise no_state_of(continued, "the critic")
        waiting = (continued.state.get(GROUPS) or {}).get("steps", ())
        if waiting and not config.asynchronous.partial_rollout:
            raise unfinished_groups(continued.folder, len(waiting))
        rows = self.rows(config)
        if len(rows) > CHECKED_ROWS and not continued.has_changed("data.", "model."):
            return  # the trainer compares them, without a second pass over all of them here
        try:
            config.data.source(rows, data_tokenizer(config.model), config.seed).load_state_dict(saved)
        except ValueError as error:
            raise other_data(continued, f"data.path={config.data.path}", error) from error

    def ready(self, config: C) -> C:
        """With the path of the demonstration's model, which is made where it is not there yet."""
        return replace(config, model=config.model.prepared(Path(config.run_dir)))


def longest_sequence(config: RLOptions) -> int:
    """Return the maximum number of tokens of a prompt, or of an episode, with its response."""
    most_prompt, most_new = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    read, size = config.agent.longest_prompt(most_prompt, most_new), model_size(config.model.path)
    limits = (read and read + most_new, size and size.positions)
    return min(filter(None, limits), default=most_prompt + most_new)


def _check_positions(config: RLOptions) -> None:
    """ValueError where no prompt at all leaves room for a response; `check_prompts` looks at the prompts."""
    size, most = model_size(config.model.path), config.rollout.max_new_tokens
    if not config.agent.func_path and size is not None and 0 < size.positions <= most:
        raise ConfigError(
            f"rollout.max_new_tokens={most}, and model.path={config.model.path} has {size.positions} positions for "
            "prompt and response together; lower it"
        )

"""From the command line to a finished run: configuration -> job -> submit."""

import sys
import time
from dataclasses import replace
from pathlib import Path

from components.launch import STOP_GRACE_S, open_run, printed, run_job
from components.tracking import redact
from components.warm_start import resolve_model
from core import Job, RLJobBuilder, Role, describe_options, given_options, load_config

from .config import RECIPE, PPOConfig
from .data import check_inputs
from .layout import engine_of, resolved

PRESET = Path(__file__).parent / "tiny.yaml"


def read_config(arguments: list[str]) -> PPOConfig:
    """The configuration. Without a model or a configuration file of the user's own it starts from the tiny preset."""
    given = given_options(PPOConfig, arguments)
    config = load_config(PPOConfig, arguments, files=[] if given & {"pretrain", "config"} else [PRESET])
    config.check_given(given)
    return config


def build_job(config: PPOConfig) -> Job:
    """What runs where."""
    roles = f"{__package__}.roles"
    builder = RLJobBuilder().config(config).node_num(config.nodes)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S)
    builder.trainer(f"{__package__}.trainer:PPOTrainer")
    builder.actor(f"{roles}.actor:Actor").nnodes(config.actor_num_nodes)
    builder.nproc_per_node(config.actor_num_gpus_per_node or 1).resource(accelerator=1)
    if config.needs_critic:
        builder.critic(f"{roles}.critic:Critic").nnodes(config.critic_num_nodes)
        builder.nproc_per_node(config.critic_num_gpus_per_node or 1).resource(accelerator=1)
    devices = config.vllm_tensor_parallel_size
    builder.rollout(f"{roles}.rollout:Rollout").total(config.vllm_num_engines or 1)
    builder.resource(cpu=devices, accelerator=devices).max_restarts(config.max_restarts)
    rewards = config.reward_num_nodes * (config.reward_num_gpus_per_node or 1)
    builder.reward(f"{roles}.reward:Reward").total(rewards).resource(accelerator=1 if config.reward_models else 0)
    builder.max_restarts(config.max_restarts)
    if config.needs_reference:
        builder.reference(f"{roles}.reference:Reference").total(
            config.ref_num_nodes * (config.ref_num_gpus_per_node or 1)
        ).resource(accelerator=1).max_restarts(config.max_restarts)
    if config.colocate_all_models:
        builder.with_collocation_all(*(() if config.reward_models else (Role.REWARD,)))
    if config.colocate_actor_ref:
        builder.with_collocation(Role.ACTOR, Role.REFERENCE)
    if config.colocate_critic_reward:
        builder.with_collocation(Role.CRITIC, Role.REWARD)
    return builder.build()


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
    began = time.time()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(describe_options(PPOConfig))
        return 0
    try:
        asked, given = read_config(arguments), given_options(PPOConfig, arguments)
        config = resolved(asked)
        notes = replace(asked, rollout_engine=config.rollout_engine).notes(given)
        job = build_job(config)
        job.check_backend(config.backend)
        plan = job.model_copy(update={"config": redact(config)}).model_dump_json(indent=2)
        if config.print_config or config.dry_run:
            print(printed(asked, given) if config.print_config else plan)
            print("".join(f"{RECIPE}: {note}\n" for note in notes), end="", file=sys.stderr)
            return 0
        check_inputs(config)
        run_dir = open_run(config.run_dir, config.resume, config.ckpt_path, plan)
    except (ValueError, OSError) as error:
        print(f"{RECIPE}: {error}", file=sys.stderr)
        return 2
    job.config = replace(config, run_dir=str(run_dir), pretrain=resolve_model(config.pretrain))
    return run_job(
        job,
        recipe=RECIPE,
        run_dir=run_dir,
        seed=config.seed,
        backend=config.backend,
        began=began,
        job_name=config.job_name,
        lines=[
            f"{job.describe()}; {'bf16' if config.bf16 else 'fp32'}, {config.attn_implementation or 'auto'}",
            engine_of(asked),
            *notes,
        ],
        seconds={"warm_start": time.time() - began},
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before there was anything to stop
        sys.exit(130)

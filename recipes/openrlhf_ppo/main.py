"""From the command line to a finished run: configuration -> job -> submit."""

import sys
import time
from dataclasses import replace
from pathlib import Path

from core import Job, RLJobBuilder, Role
from training.config import changed_options, describe_options, given_options, load_config
from training.launch import STOP_GRACE_S, open_run
from training.plan import Plan, steps_text
from training.warm_start import resolve_model

from .config import RECIPE, PPOConfig
from .data import check_inputs
from .layout import engine_of, memory_needs, resolved

PRESET = Path(__file__).parent / "tiny.yaml"


def presets(arguments: list[str]) -> list[Path]:
    """What a run starts from: without a model or a configuration file of the user's own the tiny preset."""
    return [] if given_options(PPOConfig, arguments) & {"pretrain", "config"} else [PRESET]


def read_config(arguments: list[str]) -> PPOConfig:
    """What the user asks for."""
    config = load_config(PPOConfig, arguments, files=presets(arguments))
    config.check_given(given_options(PPOConfig, arguments))
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


def make_plan(asked: PPOConfig, arguments: list[str]) -> Plan:
    """What the run will use, and why."""
    config = resolved(asked)
    job = build_job(config)
    precision = f"{'bf16' if config.bf16 else 'fp32'}, attention {config.attn_implementation or 'auto'}"
    return Plan(
        recipe=RECIPE,
        job=job,
        config=config,
        changed=changed_options(PPOConfig, arguments, presets(arguments)),
        needs=memory_needs(config, job),
        steps=steps_text(config.arithmetic, config.prompt_data, config.max_samples, config.prompt_data_probs),
        choices=[f"deepspeed zero_stage={config.engine(0.0, 1).stage} {precision}", engine_of(asked)],
        notes=replace(asked, rollout_engine=config.rollout_engine).notes(given_options(PPOConfig, arguments)),
        overlaps=config.async_train,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
    began = time.time()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(describe_options(PPOConfig))
        return 0
    try:
        asked = read_config(arguments)
        plan = make_plan(asked, arguments)
        if plan.is_all(asked, given_options(PPOConfig, arguments)):
            return 0
        config = plan.config
        plan.steps = config.arithmetic(check_inputs(config))
        run_dir = open_run(config.run_dir, config.resume, config.ckpt_path, plan.json())
    except (ValueError, OSError) as error:
        print(f"{RECIPE}: {error}", file=sys.stderr)
        return 2
    plan.job.config = replace(config, run_dir=str(run_dir), pretrain=resolve_model(config.pretrain))
    return plan.run(run_dir, began, warm_start=time.time() - began)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before there was anything to stop
        sys.exit(130)

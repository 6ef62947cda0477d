"""From the command line to a finished run: configuration -> job -> submit."""

from dataclasses import replace
from pathlib import Path

from core import Job, RLJobBuilder, Role
from training.command import Command
from training.launch import STOP_GRACE_S
from training.plan import Plan, steps_text
from training.warm_start import resolve_model

from .config import RECIPE, PPOConfig
from .data import check_inputs
from .layout import engine_of, memory_needs, resolved
from .options import renamed, shared_options


def build_job(config: PPOConfig) -> Job:
    """What runs where."""
    roles = f"{__package__}.roles"
    builder = RLJobBuilder().config(config).node_num(config.nodes)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S, config.placement_timeout)
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
        references = config.ref_num_nodes * (config.ref_num_gpus_per_node or 1)
        builder.reference(f"{roles}.reference:Reference").total(references).resource(accelerator=1)
        builder.max_restarts(config.max_restarts)
    if config.colocate_all_models:
        builder.with_collocation_all(*(() if config.reward_models else (Role.REWARD,)))
    if config.colocate_actor_ref:
        builder.with_collocation(Role.ACTOR, Role.REFERENCE)
    if config.colocate_critic_reward:
        builder.with_collocation(Role.CRITIC, Role.REWARD)
    return builder.build()


class PPOCommand(Command[PPOConfig]):
    """The command line, whose options are flat."""

    models = frozenset({"pretrain", "config"})

    def read(self, arguments: list[str]) -> PPOConfig:
        """What the user asks for."""
        config = super().read(arguments)
        config.check_given(self.given(arguments))
        return config

    def renamed(self, text: str, arguments: list[str]) -> str:  # noqa: ARG002
        """See `Command.renamed`."""
        return renamed(text)

    def plan(self, asked: PPOConfig, arguments: list[str]) -> Plan:
        """See `Command.plan`."""
        config = resolved(asked)
        job, shared = build_job(config), shared_options(config)
        precision = f"{shared.train.precision}, attention {config.attn_implementation or 'auto'}"
        return Plan(
            recipe=RECIPE,
            job=job,
            config=config,
            changed=self.changed(arguments),
            needs=memory_needs(config, job),
            steps=steps_text(shared.arithmetic, config.prompt_data, config.max_samples, config.prompt_data_probs),
            choices=[f"deepspeed zero_stage={shared.train.stage} {precision}", engine_of(asked)],
            notes=replace(asked, rollout_engine=config.rollout_engine).notes(self.given(arguments)),
            overlaps=config.async_train,
        )

    def check(self, plan: Plan) -> None:
        """See that models, data and reward can be there, and count the prompts."""
        plan.steps = shared_options(plan.config).arithmetic(check_inputs(plan.config))

    def checkpoints(self, config: PPOConfig) -> str | None:
        """See `Command.checkpoints`."""
        return config.ckpt_path

    def ready(self, config: PPOConfig) -> PPOConfig:
        """With the path of the demonstration's model, which is made where it is not there yet."""
        return replace(config, pretrain=resolve_model(config.pretrain))


COMMAND = PPOCommand(PPOConfig, Path(__file__).parent)
read_config = COMMAND.read
main = COMMAND.main

if __name__ == "__main__":
    COMMAND.run()

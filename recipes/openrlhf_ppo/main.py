"""From the command line to a finished run: configuration -> job -> submit."""

from pathlib import Path

from core import Job, RLJobBuilder, Role
from core.placement import detect_devices
from training.launch.launch import STOP_GRACE_S
from training.launch.model_use import ModelUse
from training.launch.plan import Plan
from training.launch.policy_command import PolicyCommand, frozen_role

from .config import PPOConfig
from .data import check_models
from .layout import groups, resolved


def build_job(config: PPOConfig) -> Job:
    """Build the job of a resolved configuration: the processes of each role, and their placement."""
    placement = config.placement
    roles = f"{__package__}.roles"
    builder = RLJobBuilder().config(config).node_num(placement.nodes)
    if gpus := detect_devices():
        builder.device_per_node(placement.devices_per_node or gpus)
    builder.recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S, config.placement_timeout)
    builder.trainer(f"{__package__}.trainer:PPOTrainer")
    nodes = placement.nodes_of("actor")
    builder.actor(f"{roles}.actor:Actor").nnodes(nodes).nproc_per_node((placement.actor_ranks or 1) // nodes)
    builder.resource(accelerator=1)
    if config.needs_critic:
        nodes = placement.nodes_of("critic")
        builder.critic(f"{roles}.critic:Critic").nnodes(nodes).nproc_per_node((placement.critic_ranks or 1) // nodes)
        builder.resource(accelerator=1)
    devices = config.rollout.tensor_parallel
    builder.rollout(f"{roles}.rollout:Rollout").total(placement.rollout_engines or 1)
    builder.resource(cpu=devices, accelerator=devices).max_restarts(config.max_restarts)
    reward = f"{roles}.reward:Reward"
    count = placement.rewards or 1
    nodes = placement.nodes_of("reward")
    if config.reward_model.path:
        frozen_role(builder, Role.REWARD, (reward, f"{reward}Rank"), count, nodes, config)
        builder.resource(accelerator=1)
    else:
        # Code and servers need no GPU of this job.
        builder.reward(reward).total(count).max_restarts(config.max_restarts)
        builder.resource(accelerator=0)
    if config.has_reference_role:
        classes = (f"{roles}.reference:Reference", f"{roles}.reference:ReferenceRank")
        count = placement.references or 1
        nodes = placement.nodes_of("reference")
        frozen_role(builder, Role.REFERENCE, classes, count, nodes, config)
        builder.resource(accelerator=1)
    for group in groups(config):
        # Without GPUs there is no device to share.
        if gpus and len(group) > 1:
            builder.with_collocation(*map(Role, group))
    return builder.build()


class PPOCommand(PolicyCommand[PPOConfig]):
    """The command line."""

    is_adapted = True

    def resolved(self, requested: PPOConfig) -> PPOConfig:
        """See `PolicyCommand.resolved`."""
        return resolved(requested)

    def model_uses(self, config: PPOConfig, job: Job) -> list[ModelUse]:
        """See `PolicyCommand.model_uses`."""
        frozen = config.frozen_engine
        paths = config.reward_model.paths
        critic = ModelUse(
            role=Role.CRITIC,
            path=config.critic_start,
            config=config.critic_engine(1),
            sequences=config.mini_batch_size,
            has_head=False,
            sleeps=config.placement.learners_sleep,
        )
        rewards = [
            ModelUse(role=Role.REWARD, path=path, config=frozen, sequences=config.step_size, has_head=False)
            for path in paths
        ]
        return [*super().model_uses(config, job), critic, *rewards]

    def models(self, config: PPOConfig) -> dict[str, str]:
        """See `Command.models`."""
        models = super().models(config)
        if config.needs_critic and config.critic.path:
            models["critic.path"] = config.critic.path
        # reward_model.path may name several models, which are checked and reported separately.
        return models | {f"reward_model.path[{i}]": path for i, path in enumerate(config.reward_model.paths)}

    def check(self, plan: Plan) -> None:
        """See `PolicyCommand.check`. Also checks critic and reward models."""
        super().check(plan)
        plan.notes = [*plan.notes, *check_models(plan.config, plan.absent)]


COMMAND = PPOCommand(PPOConfig, Path(__file__).parent, build_job)
read_config = COMMAND.read
main = COMMAND.main

if __name__ == "__main__":
    COMMAND.run()

"""What `auto` means on this machine: how many workers each role has, in which precision, with which attention."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from components.engines.choice import choose_attention
from components.engines.memory import Need, together
from core import Job, Role
from core.placement import detect_devices
from training.machines import cores_here
from training.plan import Estimate
from training.schema import ConfigError

from .config import PPOConfig
from .options import shared_options


def resolved(config: PPOConfig) -> PPOConfig:
    """The configuration with everything that was left to the machine filled in, and ~ written out.

    Raises:
        ConfigError: it asks for what this machine does not have.
    """
    gpus = detect_devices()
    engine, devices = engine_of(config).partition(" ")[0], config.vllm_tensor_parallel_size
    if gpus and devices > 1 and config.colocate_all_models:
        raise ConfigError(f"vllm_tensor_parallel_size={devices} shares no devices yet; unset colocate_all_models")
    if engine == "vllm" and config.vllm_enable_sleep and config.agent_func_path:
        agent = f"agent_func_path={config.agent_func_path}"
        raise ConfigError(f"vllm does not sleep between episodes of {agent}; leave vllm_enable_sleep out")
    ranks = _workers_per_node(config, gpus)
    if not gpus:
        _check_cores(ranks)
    return replace(
        config,
        bf16=gpus > 0 if config.bf16 is None else config.bf16,
        attn_implementation=choose_attention(config.attn_implementation, gpus),
        pretrain=_at_home(config.pretrain),
        critic_pretrain=config.critic_pretrain and _at_home(config.critic_pretrain),
        reward_pretrain=",".join(map(_at_home, config.reward_models)) or None,
        actor_num_gpus_per_node=ranks["actor"],
        critic_num_gpus_per_node=ranks.get("critic", config.critic_num_gpus_per_node),
        ref_num_gpus_per_node=ranks.get("ref", config.ref_num_gpus_per_node),
        reward_num_gpus_per_node=ranks.get("reward", config.reward_num_gpus_per_node or 1),
        vllm_num_engines=config.vllm_num_engines or max(1, ranks["rollout"] // devices) * config.actor_num_nodes,
        rollout_engine=engine,
    )


def engine_of(config: PPOConfig) -> str:
    """Who generates, and why, in a line that begins with its name."""
    return shared_options(config).rollout.chosen(detect_devices(), config.pretrain, config.eval_temperature)[1]


def memory_needs(config: PPOConfig, job: Job) -> dict[str, Need]:
    """What a process of each role takes that holds a model."""
    shared = shared_options(config)
    policy, dtype, passes = config.pretrain, shared.dtype, shared.forward_limits
    batch, sleeps = config.train_batch_size, config.deepspeed_enable_sleep
    actor, critic = shared.train_engine(1), shared.critic_engine(1)
    estimate = Estimate(job, policy, config.prompt_max_len, config.generate_max_len, shared.agent)
    rewards = [estimate.inferred(path, dtype, passes, has_head=False) for path in config.reward_models]
    return {
        Role.ACTOR: estimate.trained(Role.ACTOR, policy, actor, batch, publishes=True, sleeps=sleeps),
        Role.CRITIC: estimate.trained(Role.CRITIC, config.critic_start, critic, batch, has_head=False, sleeps=sleeps),
        Role.ROLLOUT: estimate.sampled(Role.ROLLOUT, policy, shared.rollout_engine(), shared.step_size),
        Role.REFERENCE: estimate.inferred(policy, dtype, passes),
        Role.REWARD: together(Need(), *rewards),
    }


def _at_home(path: str) -> str:
    """The path with ~ written out: the shell leaves it in pretrain=~/model."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def _workers_per_node(config: PPOConfig, gpus: int) -> dict[str, int]:
    """Workers on each machine of every role that holds a model."""
    given = {
        "actor": config.actor_num_gpus_per_node,
        "critic": config.critic_num_gpus_per_node if config.needs_critic else 0,
        "ref": config.ref_num_gpus_per_node if config.needs_reference else 0,
        "reward": config.reward_num_gpus_per_node if config.reward_models else 0,
        "rollout": config.vllm_num_engines
        and math.ceil(config.vllm_num_engines * config.vllm_tensor_parallel_size / config.actor_num_nodes),
    }
    roles = [role for role, count in given.items() if count != 0]
    pairs = [("actor", "ref")] * config.colocate_actor_ref + [("critic", "reward")] * config.colocate_critic_reward
    groups: list[tuple[str, ...]] = [tuple(roles)] if config.colocate_all_models else list(pairs)
    groups += [(role,) for role in roles if not any(role in group for group in groups)]
    # The roles of a group share devices; the groups that name no number share what the others leave.
    named = {group: next((given[role] for role in group if given[role]), None) for group in groups}
    left = gpus - sum(count or 0 for count in named.values())
    each = max(1, left // max(1, sum(count is None for count in named.values())))
    return {role: given[role] or named[group] or each for group in groups for role in group}


def _check_cores(ranks: Mapping[str, int]) -> None:
    # On a cluster the machine at hand says nothing; Ray refuses there what does not fit.
    cores = cores_here()
    if cores is None:
        return
    options = {role: f"{role}_num_gpus_per_node" for role in ranks} | {"rollout": "vllm_num_engines"}
    for role, count in ranks.items():
        if count > cores:
            raise ConfigError(
                f"{options[role]}={count}, but this machine has no GPU and {cores} CPU cores, one for each worker; "
                f"set at most {cores}, or leave it out"
            )

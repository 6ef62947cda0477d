"""What was left to the machine, filled in: how many workers each role has, who generates, with which attention."""

from collections.abc import Mapping
from dataclasses import replace

from components.models.attention import choose_attention
from components.train.config import choose_precision
from core.placement import detect_devices
from training.launch.machines import cores_here, is_here
from training.options.schema import ConfigError

from .config import COUNTS, SPREAD, PPOConfig


def resolved(config: PPOConfig) -> PPOConfig:
    """The configuration with everything filled in that was left to the machine.

    Raises:
        ConfigError: it asks for what this machine does not have.
    """
    own = config.placement
    gpus = detect_devices() and (own.devices_per_node or detect_devices())
    temperature, rank = config.evaluation.temperature, config.train.lora_rank
    rollout, _ = config.rollout.chosen(gpus, config.model.path, temperature, lora_rank=rank)
    workers = _workers(config, gpus)
    if not gpus:
        _check_cores(workers)
    attention = choose_attention(config.model.attn_implementation, gpus)
    return replace(
        config,
        model=replace(config.model, attn_implementation=attention),
        rollout=replace(rollout, weight_sync=config.weight_sync(gpus)[0]),
        train=replace(config.train, precision=choose_precision(config.train.precision, gpus)),
        placement=replace(
            own.with_sleep(gpus, rollout.engine),
            nodes=_machines(config, workers, gpus),
            **{COUNTS[role]: count for role, count in workers.items()},
            **{f"{role}_nodes": own.nodes_of(role) for role in SPREAD},
        ),
    )


def _workers(config: PPOConfig, gpus: int) -> dict[str, int]:
    """How many workers each role has. Roles whose number was left open share what the others leave of a machine's
    devices.
    """
    parts, nodes = groups(config), _nodes(config)
    width = {"rollout": config.rollout.tensor_parallel if gpus else 1}
    given: dict[str, int | None] = {role: getattr(config.placement, COUNTS[role]) for group in parts for role in group}
    # Devices on each machine.
    taken = {role: -(-count * width.get(role, 1) // nodes[role]) for role, count in given.items() if count}
    named = {group: next((taken[role] for role in group if role in taken), None) for group in parts}
    left = gpus - sum(count or 0 for count in named.values())
    each = max(1, left // max(1, sum(count is None for count in named.values())))
    found = dict[str, int]()
    for group in parts:
        for role in group:
            devices = (named[group] or each) * nodes[role]
            found[role] = given[role] or max(1, devices // width.get(role, 1))
    return found


def _nodes(config: PPOConfig) -> dict[str, int]:
    """Machines over which each role is spread; the engines are where the actor is."""
    found = {role: config.placement.nodes_of(role) for role in SPREAD}
    return found | {"rollout": found["actor"]}


def _machines(config: PPOConfig, workers: Mapping[str, int], gpus: int) -> int:
    """How many there are. OpenRLHF's commands do not say that: on a cluster as many as the roles need."""
    named = max(config.placement.nodes, *_nodes(config).values())
    if not gpus or is_here():
        return named
    width = {"rollout": config.rollout.tensor_parallel}
    needed = [max(workers[role] * width.get(role, 1) for role in group) for group in groups(config)]
    return max(named, -(-sum(needed) // gpus))


def groups(config: PPOConfig) -> list[tuple[str, ...]]:
    """The roles that take devices; those that share some together."""
    own = config.placement
    wanted = {
        "critic": config.needs_critic,
        "reference": config.has_reference_role,
        "reward": config.reward_model.path is not None,
    }
    roles = tuple(role for role in COUNTS if wanted.get(role, True))
    shared: list[tuple[str, ...]] = []
    if own.colocate:
        shared = [roles]
    elif own.colocate_models:
        shared = [tuple(role for role in roles if role != "rollout")]
    else:
        pairs = [("actor", "reference")] * own.colocate_actor_reference
        pairs += [("critic", "reward")] * own.colocate_critic_reward
        shared = [pair for pair in pairs if set(pair) <= set(roles)]
    return shared + [(role,) for role in roles if not any(role in group for group in shared)]


def _check_cores(workers: Mapping[str, int]) -> None:
    cores = cores_here()
    for role, count in workers.items():
        if cores is not None and count > cores:
            raise ConfigError(
                f"placement.{COUNTS[role]}={count}, but this machine has no GPU and {cores} CPU cores, one for each "
                f"worker; set at most {cores}, or leave it out"
            )

"""Resolution of options that depend on the machine: number of workers, generation engine, attention kernels."""

from collections.abc import Mapping
from dataclasses import replace

from components.models.attention import choose_attention
from core.placement import detect_devices
from training.launch.machines import cores_here, is_this_machine
from training.options.schema import ConfigError

from .config import COUNTS, SPREAD, PPOConfig


def resolved(config: PPOConfig) -> PPOConfig:
    """Return the configuration with all options resolved that depend on the machine.

    Raises:
        ConfigError: it needs more cores than this machine has.
    """
    placement = config.placement
    gpus = detect_devices() and (placement.devices_per_node or detect_devices())
    temperature = config.evaluation.temperature
    rank = config.train.lora_rank
    rollout, _ = config.rollout.chosen(gpus, config.model.path, temperature, lora_rank=rank)
    workers = _workers(config, gpus)
    # Ray would otherwise wait for the missing cores until placement_timeout has passed.
    if not gpus:
        _check_cores(workers)
    attention = choose_attention(config.model.attn_implementation, gpus)
    return replace(
        config,
        model=replace(config.model, attn_implementation=attention),
        rollout=replace(rollout, weight_sync=config.weight_sync(gpus)[0]),
        train=config.train.resolved(gpus),
        placement=replace(
            placement.with_sleep(gpus, rollout.engine),
            nodes=_machines(config, workers, gpus),
            **{COUNTS[role]: count for role, count in workers.items()},
            **{f"{role}_nodes": placement.nodes_of(role) for role in SPREAD},
        ),
    )


def _workers(config: PPOConfig, gpus: int) -> dict[str, int]:
    """Return the number of workers of each role. Roles without a configured number share the remaining devices."""
    parts = groups(config)
    nodes = _nodes(config)
    width = {}
    if gpus:
        # On CPUs an engine is one process, whatever tensor_parallel says.
        width["rollout"] = config.rollout.tensor_parallel
    counts: dict[str, int | None] = {role: getattr(config.placement, COUNTS[role]) for group in parts for role in group}
    # Numbers of devices per machine.
    taken = {role: -(-count * width.get(role, 1) // nodes[role]) for role, count in counts.items() if count}
    named = {group: next((taken[role] for role in group if role in taken), None) for group in parts}
    # Devices that no option assigns are divided equally among the groups without a number, at least one for each.
    left = gpus - sum(count or 0 for count in named.values())
    each = max(1, left // max(1, sum(count is None for count in named.values())))
    workers = dict[str, int]()
    for group in parts:
        per_node = named[group] or each
        for role in group:
            workers[role] = counts[role] or max(1, per_node * nodes[role] // width.get(role, 1))
    return workers


def _nodes(config: PPOConfig) -> dict[str, int]:
    """Return the number of machines of each role. The engines are spread over those of the actor."""
    nodes = {role: config.placement.nodes_of(role) for role in SPREAD}
    return nodes | {"rollout": nodes["actor"]}


def _machines(config: PPOConfig, workers: Mapping[str, int], gpus: int) -> int:
    """Return the number of machines. OpenRLHF's commands do not set it, so on a cluster the roles determine it."""
    named = max(config.placement.nodes, *_nodes(config).values())
    # A single machine cannot grow. Too large numbers of workers are then an error of the placement.
    if not gpus or is_this_machine():
        return named
    width = {"rollout": config.rollout.tensor_parallel}
    needed = [max(workers[role] * width.get(role, 1) for role in group) for group in groups(config)]
    return max(named, -(-sum(needed) // gpus))


def groups(config: PPOConfig) -> list[tuple[str, ...]]:
    """Return the roles that take devices, in groups that share devices."""
    placement = config.placement
    needed = {
        "critic": config.needs_critic,
        "reference": config.has_reference_role,
        "reward": config.reward_model.path is not None,
    }
    roles = tuple(role for role in COUNTS if needed.get(role, True))
    shared: list[tuple[str, ...]] = []
    if placement.colocate:
        shared = [roles]
    elif placement.colocate_models:
        shared = [tuple(role for role in roles if role != "rollout")]
    else:
        pairs = {
            ("actor", "reference"): placement.colocate_actor_reference,
            ("critic", "reward"): placement.colocate_critic_reward,
        }
        # A pair without one of its roles is no pair: the other role gets devices of its own.
        shared = [pair for pair, is_colocated in pairs.items() if is_colocated and set(pair) <= set(roles)]
    return shared + [(role,) for role in roles if not any(role in group for group in shared)]


def _check_cores(workers: Mapping[str, int]) -> None:
    cores = cores_here()
    for role, count in workers.items():
        if cores is not None and count > cores:
            raise ConfigError(
                f"placement.{COUNTS[role]}={count}, but this machine has no GPU and {cores} CPU cores, one for each "
                f"worker; set at most {cores}, or leave it out"
            )

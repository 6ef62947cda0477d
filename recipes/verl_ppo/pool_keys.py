"""verl's keys of machines and pools."""

from collections.abc import Mapping

from training.options.table_adapter import Computed

from .reward_keys import asks_served_model

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
OWNERS = {"actor": ACTOR, "rollout": ROLLOUT, "ref": "actor_rollout_ref.ref", "critic": "critic", "rm": "reward_model"}
"""Role -> group of verl's keys with its `resource_pool_id`."""


def read_named_pools(keys: Computed) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return the pools of `resource_pool_specs`, and the pool of each role by its key `resource_pool_id`."""
    ids = {role: f"{owner}.resource_pool_id" for role, owner in OWNERS.items()}
    specs = keys.get("resource_pool_specs") or []
    roles = {role: keys.get(name) for role, name in ids.items() if keys.get(name)}
    if not specs:
        keys.idle("resource_pool_specs is not set; trainer.nnodes and rollout.nnodes set the pools", *ids.values())
        return {}, {}
    names = [spec.get("id") if isinstance(spec, Mapping) else None for spec in specs]
    if None in names or not {"actor", "rollout"} <= roles.keys():
        keys.faults.append(
            f"resource_pool_specs={specs}: set id, nnodes and n_gpus_per_node of each pool, and name the pools of the "
            f"policy in {ids['actor']} and {ids['rollout']}"
        )
        return {}, {}
    if any("max_colocate_count" in spec for spec in specs):
        keys.notes.append("no effect of max_colocate_count: the roles of a pool share its devices")
    pools = {spec["id"]: [int(spec.get("n_gpus_per_node", 8))] * int(spec.get("nnodes", 1)) for spec in specs}
    return pools, roles


def read_pools(keys: Computed) -> None:
    """Set the pools of training, of separate engines and of a reward model, and generation ahead of training."""
    nodes = keys.option("placement.nodes", 1)
    devices = keys.option("placement.devices_per_node", 8)
    sampling = keys.get("rollout.nnodes", f"{ROLLOUT}.nnodes", default=0)
    pools, roles = read_named_pools(keys)
    if sampling:
        per_node = keys.get("rollout.n_gpus_per_node", f"{ROLLOUT}.n_gpus_per_node", default=devices)
        keys.put("asynchronous.enabled", True, "rollout.nnodes")
        if not pools:
            pools = {"train": [devices] * nodes, "sample": [per_node] * sampling}
            roles = {"actor": "train", "rollout": "sample"}
    has_pool = keys.get("reward_model.enable_resource_pool", "reward.reward_model.enable_resource_pool")
    if has_pool and not asks_served_model(keys):
        judges = keys.get("reward_model.nnodes", "reward.reward_model.nnodes", default=0) or 1
        per_node = keys.get("reward_model.n_gpus_per_node", "reward.reward_model.n_gpus_per_node", default=devices)
        pools = (pools or {"global_pool": [devices] * nodes}) | {"reward": [per_node] * judges}
        roles |= {"rm": "reward"}
    if pools and keys.option("placement.pools") is None:
        keys.put("placement.pools", pools)
        keys.put("placement.role_pools", roles)
        keys.put("placement.nodes", sum(len(counts) for counts in pools.values()), "trainer.nnodes")
    engine = keys.option("rollout.engine")
    tensor_parallel = f"{ROLLOUT}.tensor_model_parallel_size"
    devices_each = keys.get(tensor_parallel)
    per_engine = keys.get("rollout.n_gpus_per_node", f"{ROLLOUT}.n_gpus_per_node") if sampling else None
    if engine != "hf" and devices_each is not None:
        node = per_engine or devices
        if devices_each > node and devices_each % node == 0:
            keys.notes.append(
                f"{tensor_parallel}={devices_each} is {node}: the devices of an engine are on one node; responses are "
                f"drawn from the same policy, and each device holds {devices_each // node} times as much of it"
            )
            devices_each = node
        keys.put("rollout.tensor_parallel", devices_each, tensor_parallel)
    elif (devices_each or 1) > 1:
        keys.notes.append("no effect of tensor_model_parallel_size: an engine hf has one device")

"""verl's keys of the optimizers of its training engines."""

from __future__ import annotations

from training.options.table_adapter import Computed

OWNERS = (("train", "actor_rollout_ref.actor"), ("critic", "critic"))
"""Group of options of a learner, and verl's group of keys."""


def read_optimizers(keys: Computed, engine: str | None) -> None:
    """Check that the optimizers are AdamW, and set the final learning rates from absolute rates.

    Args:
        keys: verl's keys.
        engine: training engine that the command asks for, if another one is used in its place.
    """
    known = ["AdamW", "adamw"]
    if engine == "megatron":
        known.append("adam")  # it decouples the weight decay, as AdamW does; torch's Adam does not
    for key, name in keys.values.items():
        if key.endswith(".optim.optimizer") and name not in (None, *known):
            keys.faults.append(f"{key}={name}: the optimizer is torch's AdamW, with lr, betas and weight_decay")
    for group, owner in OWNERS:
        key = keys.name(f"{owner}.optim.min_lr", f"{owner}.optim.lr_min")  # of Megatron, and of VeOmni
        if key is None:
            continue
        if keys.option(f"{group}.lr_scheduler", "constant") == "constant":
            keys.idle("the learning rate is constant after the warm-up", key)
        elif peak := keys.option(f"{group}.learning_rate"):
            keys.put(f"{group}.min_lr_ratio", keys.values[key] / peak, key)

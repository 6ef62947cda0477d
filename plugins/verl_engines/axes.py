"""verl's axes of parallelism, which actor and critic share here."""

from __future__ import annotations

from collections.abc import Mapping

from training.options.table_adapter import Computed

REFERENCE = "actor_rollout_ref.ref"
AXES: Mapping[str, tuple[str, ...]] = {
    "parallel.context": (
        "ulysses_sequence_parallel_size",
        "megatron.context_parallel_size",
        "veomni.ulysses_parallel_size",
        "torchtitan.context_parallel_size",
        "automodel.cp_size",
        "automodel_config.cp_size",
    ),
    "parallel.expert": (
        "megatron.expert_model_parallel_size",
        "veomni.expert_parallel_size",
        "torchtitan.expert_parallel_size",
        "automodel.ep_size",
        "automodel_config.ep_size",
    ),
    "parallel.tensor": (
        "megatron.tensor_model_parallel_size",
        "torchtitan.tensor_parallel_size",
        "automodel.tp_size",
        "automodel_config.tp_size",
    ),
}
"""Option of an axis -> ends of verl's keys of it, one for each training engine."""


def read_axes(keys: Computed) -> None:
    """Set the context, expert and tensor axes, which actor and critic share."""
    for option, ends in AXES.items():
        written = [key for key in keys.values if key.endswith(ends) and not key.startswith(REFERENCE)]
        sizes = {keys.values[key] or 1 for key in written}
        largest = max(sizes, default=1)
        # Context parallelism splits sequences. The other two axes split the parameters of a layer.
        cuts_layers = largest > 1 and option != "parallel.context"
        if cuts_layers and (keys.option("train.lora_rank", 0) or keys.option("train.lora_path")):
            keys.notes.append(
                f"no effect of {written[0]}={largest}: with adapters layers are not split, with the same results"
            )
        elif cuts_layers and option == "parallel.tensor" and keys.option("parallel.expert", 1) > 1:
            keys.notes.append(f"no effect of {written[0]}={largest}: with expert parallelism layers are not split")
        elif largest > 1:
            keys.put(option, largest, written[0])
        if len(sizes) > 1:
            keys.notes.append(f"actor and critic have the largest {written[0].rpartition('.')[2]}, {largest}")

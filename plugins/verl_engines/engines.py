"""verl's engines of training and generation, and what is used in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from components.generate.choice import BASIC_ENGINES
from components.registry import find, names
from training.options.table_adapter import Computed

from .optimizers import read_optimizers

ACTOR = "actor_rollout_ref.actor"
STRATEGIES = (f"{ACTOR}.strategy", "critic.strategy", "model_engine")
"""verl's keys of the training engine."""
NAME = "actor_rollout_ref.rollout.name"
"""verl's key of the generation engine."""
SHARDED = ("fsdp", "fsdp2", "dp")
"""verl's names of the training engine that is here; `dp` of model_engine is fsdp."""
REPLACED = ("megatron", "veomni", "torchtitan", "automodel")
"""verl's names of training engines in whose place models are trained with fully_shard."""
GENERATORS: Mapping[str, str] = {"sglang": "vllm", "sglang_async": "vllm", "trtllm": "vllm", "naive": "hf"}
"""verl's names of generation engines -> the engine in their place. sglang_async is of 0.4, naive of 0.1 to 0.3."""
PRESET = ("verl command line", "preset")
"""Registry key of the function that returns the settings of a configuration file of verl."""


def read_engines(keys: Computed) -> None:
    """Set the generation engine, and check the training engine, its optimizer, the device and the
    configuration file.
    """
    keys.faults += [*_faults_of_training(keys), *_faults_of_places(keys)]
    replaced = replaced_engine(keys)
    if replaced is not None:
        keys.notes.append(
            f"{replaced} is torch's fully_shard here, with the same axes for tensor, context and expert parallelism; "
            "instead of pipeline stages all ranks have parts of all layers"
        )
    read_optimizers(keys, replaced)
    engine = keys.get(NAME)
    here = {*BASIC_ENGINES, *names("rollout config")}
    if engine in GENERATORS and engine not in here:
        other = GENERATORS[engine]
        keys.notes.append(
            f"{NAME}={engine}: there is no engine of this name here, so {other} generates the responses, which are "
            "drawn from the same policy"
        )
        keys.put("rollout.engine", other)
    elif engine is not None:
        keys.put("rollout.engine", engine, NAME)


def replaced_engine(keys: Computed) -> str | None:
    """Return the training engine that a key or the configuration file asks for, if fully_shard is used in its place."""
    named = (*map(keys.get, STRATEGIES), *_config_name(keys).split("_"))
    return next((engine for engine in REPLACED if engine in named), None)


def _config_name(keys: Computed) -> str:
    return str(keys.get("config_name", default="")).removesuffix(".yaml")


def _faults_of_training(keys: Computed) -> Iterator[str]:
    """Yield errors for training engines that are not supported."""
    parts = [keys.get(name) for name in STRATEGIES[:2]]
    are_sharded = [part in SHARDED for part in parts]
    if None not in parts and not all(are_sharded) and (any(are_sharded) or parts[0] != parts[1]):
        yield (
            f"{STRATEGIES[0]}={parts[0]} and {STRATEGIES[1]}={parts[1]} differ: verl trains actor and critic with one "
            "kind of engine; set both to fsdp2, or both to megatron"
        )
    # Actor and critic usually name the same engine, so one message is enough.
    for other in [kind for kind in map(keys.get, STRATEGIES) if kind not in (None, *SHARDED, *REPLACED)][:1]:
        yield (
            f"{other} (actor_rollout_ref.actor.strategy) is not here: models are trained with torch's fully_shard; "
            "leave it and the keys of its own out, or set actor_rollout_ref.actor.strategy=fsdp2 and "
            "critic.strategy=fsdp2"
        )


def _faults_of_places(keys: Computed) -> Iterator[str]:
    """Yield errors for devices that are not supported, and for a configuration file that is not there."""
    if keys.get("trainer.device", default="cuda") not in ("cuda", "cpu"):
        yield f"trainer.device={keys.get('trainer.device')} is not available; recipes run on NVIDIA GPUs or CPUs"
    name = _config_name(keys)
    read_preset = find(*PRESET)
    if name and read_preset and (settings := read_preset(name)) is not None:
        sets = ", ".join(settings) or "nothing of these options"
        keys.notes.append(f"--config-name={name} is not there; verl's own file of this name sets {sets}")
    elif name not in ("", "ppo_trainer", "ppo_megatron_trainer"):
        yield f"--config-name={name}: the file is not there, nor one that verl ships; give it with --config FILE"

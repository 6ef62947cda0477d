"""Checks of the options of routing replay, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.generate.choice import text_config


def faults(options: Any) -> Iterator[str]:
    """Yield a message for each option that routing replay cannot be combined with.

    Args:
        options: options of a recipe that trains a policy.
    """
    option = f"rollout.routing_replay={options.rollout.routing_replay}"
    for axis in ("context", "tensor"):
        if (degree := getattr(options.parallel, axis)) > 1:
            yield f"{option} needs whole sequences on each rank, but parallel.{axis}={degree}; set off, or 1"
    if options.rollout.routing_replay == "engine":
        yield from _faults_of_engine(options, option)
    config = text_config(Path(options.model.path).expanduser()) if options.model.path else {}
    if config and not config.get("num_experts_per_tok", config.get("moe_k")):
        yield f"{option}: model.path={options.model.path} is no mixture of experts; set rollout.routing_replay=off"


def _faults_of_engine(options: Any, option: str) -> Iterator[str]:
    """Yield a message for each option with which the routes of the engine are not read."""
    if options.agent.func_path:
        yield f"{option} reads single responses, but agent.func_path runs episodes; set policy or off"
    if options.asynchronous.partial_rollout:
        yield f"{option} needs a response of one engine version; unset asynchronous.partial_rollout, or set policy"
    if not options.rollout.prefix_caching:
        yield f"{option}: vLLM keeps routes in its prefix cache; leave rollout.prefix_caching out, or set policy"


def engine_fault(engine: str, gpus: int) -> str:
    """Return why the experts of each token are not available from the engine.

    Args:
        engine: name of the rollout engine.
        gpus: number of GPUs of a machine.
    """
    if engine != "vllm":
        return f"the engine {engine} does not report the experts of a token; set policy or off"
    if not gpus:
        return "vLLM reports the experts of a token only on a GPU (model runner V2 requires Triton); set policy or off"
    return ""

"""Engines for requests one by one, opened by the name that their configuration has. Agents and rollouts that stay in
flight use them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from components.generate.batched_engine import BatchedEngine
from components.generate.config import RolloutConfig
from components.generate.opening import open_rollout_engine
from components.registry import find

if TYPE_CHECKING:
    from components.generate.async_engine import AsyncEngine


async def open_async_engine(model_path: str | Path, config: RolloutConfig) -> AsyncEngine:
    """Return the engine of a configuration for requests, with the weights at `model_path`, for the loop that this runs
    in.

    A plug-in may provide the `async rollout engine` of the configuration's NAME, a class with an async class method
    `open`. Otherwise requests are drawn in batches by its `rollout engine`.

    Args:
        model_path: folder or hub name of a causal model; for the tokens that end a response see end_tokens.py.
        config: configuration of the engine.
    """
    engine_class = find("async rollout engine", config.NAME)
    if engine_class is not None:
        return await engine_class.open(model_path, config)
    return BatchedEngine(open_rollout_engine(model_path, config))

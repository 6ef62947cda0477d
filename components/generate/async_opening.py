"""Creation of the engine for single requests that a configuration names. Agents use it, and rollouts that stay in
flight between training steps.
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
    """Return an engine for single requests in the running asyncio loop, with the weights at `model_path`.

    A plug-in may provide the `async rollout engine` of the configuration's NAME, a class with an async class method
    `open`. Otherwise its `rollout engine` generates the requests in batches.

    Args:
        model_path: folder or hub name of a causal model. See end_tokens.py for the tokens that end a response.
        config: configuration of the engine.
    """
    # An engine with requests of its own generates them as they arrive, instead of in batches.
    engine_class = find("async rollout engine", config.NAME)
    if engine_class is not None:
        return await engine_class.open(model_path, config)
    return BatchedEngine(open_rollout_engine(model_path, config))

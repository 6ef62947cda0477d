"""Which class of engine a configuration names, opened around a model. DeepSpeed and vLLM are imported only when needed;
transformers at once: it takes seconds, in which other roles of a run have their set-up.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from components.generate.hf_engine import HFRolloutEngine
from components.train.config import HFRolloutConfig, RolloutConfig, TrainConfig, VLLMRolloutConfig

if TYPE_CHECKING:
    from torch import nn

    from components.generate.async_engine import AsyncEngine
    from components.generate.engine import RolloutEngine
    from components.train.engine import TrainEngine


def open_engine(model: nn.Module, config: TrainConfig) -> TrainEngine:
    """The engine that `config.engine` names, around `model`. All ranks call this, with the same weights.

    Args:
        model: perhaps made empty, then the engine reads its weights; it is partitioned and cast (bf16) in place.
        config: of this engine.
    """
    if config.engine == "fsdp":
        from components.train.fsdp_engine import FSDPEngine

        return FSDPEngine(model, config)
    from plugins.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(model, config)


def open_rollout_engine(model_path: str | Path, config: RolloutConfig) -> RolloutEngine:
    """The engine that `config` is of, with the weights at `model_path`.

    Args:
        model_path: folder or hub name of a causal model; for the tokens that end a response see end_tokens.py.
        config: of the engine.
    """
    if isinstance(config, HFRolloutConfig):
        return HFRolloutEngine(model_path, config)
    assert isinstance(config, VLLMRolloutConfig)
    from plugins.vllm.engine import VLLMRolloutEngine

    return VLLMRolloutEngine(model_path, config)


async def open_async_engine(model_path: str | Path, config: RolloutConfig) -> AsyncEngine:
    """The engine that `config` is of, with the weights at `model_path`, for the loop that this runs in.

    Args:
        model_path: folder or hub name of a causal model; for the tokens that end a response see end_tokens.py.
        config: of the engine.
    """
    if isinstance(config, VLLMRolloutConfig):
        from plugins.vllm.async_engine import AsyncVLLMEngine

        return await AsyncVLLMEngine.open(model_path, config)
    from components.generate.batched_engine import BatchedEngine

    return BatchedEngine(open_rollout_engine(model_path, config))

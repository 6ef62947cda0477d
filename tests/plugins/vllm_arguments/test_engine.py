"""Engine arguments in a real vLLM engine: arguments for speed keep the log-probabilities, a quantised cache
does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from components.generate.config import SamplingConfig
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.train.config import TrainConfig
from components.train.opening import open_engine
from plugins.vllm.config import VLLMRolloutConfig
from plugins.vllm.engine import VLLMRolloutEngine
from tests.components.helpers.vllm_models import uneven_prompts, write_vllm_model

pytestmark = [pytest.mark.full, pytest.mark.vllm]

TEMPERATURE = 0.7


def gap_of(model: Path, **arguments: Any) -> Tensor:
    """Return the absolute differences between the log-probabilities of engine and trainer, in nats."""
    engine = VLLMRolloutEngine(model, VLLMRolloutConfig(cpu_cache_gb=0.1, arguments=arguments))
    responses = engine.generate(uneven_prompts(16), SamplingConfig(temperature=TEMPERATURE, max_new_tokens=64))
    cache = engine._llm.llm_engine.vllm_config.cache_config
    scheduler = engine._llm.llm_engine.vllm_config.scheduler_config
    engine.close()
    assert cache.block_size == arguments.get("block_size", cache.block_size)
    assert cache.cache_dtype == arguments.get("kv_cache_dtype", "auto")
    batched = arguments.get("max_num_batched_tokens", scheduler.max_num_batched_tokens)
    assert scheduler.max_num_batched_tokens == batched
    trainer = open_engine(load_policy(model), TrainConfig(engine="fsdp", zero_stage=2))
    logprob_N = trainer.forward(responses, lambda m, batch: token_logprobs(m, batch, TEMPERATURE).logprob_N)
    return (logprob_N - responses["rollout_logprob"])[responses["action_mask"]].abs()


def test_speed_arguments_keep_the_log_probabilities_and_an_fp8_cache_changes_them(tmp_path: Path) -> None:
    model = write_vllm_model(tmp_path / "model", seed=11, tied=True)
    usual = gap_of(model)
    fast = gap_of(model, block_size=32, max_num_batched_tokens=1024)
    rounded = gap_of(model, kv_cache_dtype="fp8")
    print(f"gap in nats, mean / largest: usual {usual.mean():.1e} / {usual.max():.1e}, block_size and")
    print(
        f"max_num_batched_tokens {fast.mean():.1e} / {fast.max():.1e}, fp8 {rounded.mean():.1e} / {rounded.max():.1e}"
    )
    assert usual.max() < 1e-4
    assert fast.max() < 1e-4
    assert 1e-4 < rounded.mean() < 0.3

"""Weights that vLLM's loader writes into a model in use, without a layerwise reload, as on a GPU.

A CPU packs weights after loading, so that the engine itself is always reloaded there. The models that are compared here
are left as the loader wrote them, which is what GPU kernels of unquantized dense models use.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from components.models.loading import load_policy
from plugins.vllm.config import VLLMRolloutConfig
from plugins.vllm.engine import VLLMRolloutEngine
from plugins.vllm_weights.reload import has_plain_layers, load_in_place, loads_in_place
from tests.messages import says
from tests.plugins.vllm.families import change, weights_of, write_family


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VLLMRolloutEngine]:
    engine = VLLMRolloutEngine(write_family(request.param, tmp_path / "model"), VLLMRolloutConfig(cpu_cache_gb=0.1))
    yield engine
    engine.close()


def new_model(worker: Any) -> Any:
    """Create the engine's model again in its process, with no weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = worker.vllm_config
    context = config.compilation_config.static_forward_context
    layers = dict(context)
    # vLLM accepts each name of an attention layer once.
    context.clear()
    try:
        with set_current_vllm_config(config):
            return initialize_model(vllm_config=config)
    finally:
        context.clear()
        context.update(layers)


def is_plain(worker: Any) -> bool:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    model = worker.model_runner.model
    assert not loads_in_place(model, is_quantized=False)  # on a CPU
    return has_plain_layers(model, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod), Attention)


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["qwen2"], indirect=True)
def test_weights_written_in_place_equal_those_of_a_new_model(engine: VLLMRolloutEngine, tmp_path: Path) -> None:
    policy = load_policy(tmp_path / "model")
    before = [(name, tensor.clone()) for name, tensor in weights_of(policy)]
    change(policy, seed=1)
    after = dict(weights_of(policy))

    def compare(worker: Any) -> list[str]:
        model, fresh = new_model(worker), new_model(worker)
        model.load_weights(before)
        addresses = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        load_in_place(model, after.items())
        fresh.load_weights(after.items())
        expected = dict(fresh.named_parameters())
        assert addresses == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        with pytest.raises(RuntimeError, match=says("model.norm.weight not loaded")):
            load_in_place(model, ((name, tensor) for name, tensor in after.items() if name != "model.norm.weight"))
        return [name for name, tensor in model.named_parameters() if not torch.equal(tensor, expected[name])]

    assert engine._llm.collective_rpc(is_plain) == [True]
    assert engine._llm.collective_rpc(compare) == [[]]


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["mixtral", "gpt_oss"], indirect=True)
def test_mixtures_need_a_layerwise_reload(engine: VLLMRolloutEngine) -> None:
    assert engine._llm.collective_rpc(is_plain) == [False]

"""Adapters sent separately from a trainer to vLLM engines. Legend: N all tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from components.batch import Batch
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.engine import adapter_misfit
from components.models.causal import policy_logprobs
from components.models.loading import load_policy
from components.train.config import TrainConfig
from components.train.engine import TrainEngine
from components.train.opening import open_engine
from components.weights.publisher import WeightHandle, WeightPublisher
from plugins.vllm.adapters import adapter_arguments, no_change
from plugins.vllm.async_engine import AsyncVLLMEngine
from plugins.vllm.config import HOLD_ADAPTERS, MOST_LORA_RANK, VLLMRolloutConfig
from plugins.vllm.engine import VLLMRolloutEngine
from tests.components.helpers.vllm_models import POSITIONS, uneven_prompts, write_vllm_model
from tests.messages import says

pytestmark = [pytest.mark.full, pytest.mark.vllm]
RANK, SCALE = 6, 2.0
CONFIG = VLLMRolloutConfig(cpu_cache_gb=0.25, lora_rank=RANK)
HIDDEN, LAYERS = 128, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vllm_model(tmp_path_factory.mktemp("adapters") / "model", seed=11, tied=True)


@pytest.fixture(scope="module")
def trainer(model: Path) -> TrainEngine:
    """A policy with adapters that are not 0."""
    options: dict[str, Any] = {"engine": "fsdp", "zero_stage": 2, "lora_rank": RANK, "lora_alpha": SCALE * RANK}
    engine = open_engine(load_policy(model, empty=True), TrainConfig(**options))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return engine


@pytest.fixture(scope="module")
def published(trainer: TrainEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightHandle]:
    publisher = WeightPublisher(tmp_path_factory.mktemp("published"))
    yield publisher.publish(3, trainer.gathered_adapters(), with_digests=True, adapter_scale=SCALE)
    publisher.close()


def gap_of(trainer: TrainEngine, responses: Batch, *, adapters: bool) -> float:
    """Return the maximum difference of the log-probs of engine and trainer, in nats."""
    compute = partial(policy_logprobs, temperature=1.0)
    gap_N = trainer.forward(responses, compute, adapters=adapters) - responses["rollout_logprob"]
    return float(gap_N[responses["action_mask"]].abs().max())


def test_an_engine_with_received_adapters_samples_from_the_policy(
    model: Path, trainer: TrainEngine, published: WeightHandle, tmp_path: Path
) -> None:
    sampling = SamplingConfig(max_new_tokens=12)
    engine = VLLMRolloutEngine(model, CONFIG)
    before = engine.generate(uneven_prompts(20), sampling)
    assert gap_of(trainer, before, adapters=False) < 1e-4
    engine.receive(published, verify=True)
    after = engine.generate(uneven_prompts(20), sampling)
    assert gap_of(trainer, after, adapters=True) < 1e-4
    assert gap_of(trainer, after, adapters=False) > 1
    assert set(after["weight_version"].tolist()) == {3}
    publisher = WeightPublisher(tmp_path / "whole")
    with pytest.raises(ValueError, match=says("version 4", "weights", "adapters", "lora_rank")):
        engine.receive(publisher.publish(4, trainer.gathered_parameters()))
    later = ((name, torch.zeros_like(tensor)) for name, tensor in trainer.gathered_adapters())
    engine.receive(publisher.publish(5, later, adapter_scale=SCALE))
    assert gap_of(trainer, engine.generate(uneven_prompts(20), sampling), adapters=False) < 1e-4
    publisher.close()
    engine.close()


def test_only_the_adapters_are_published(trainer: TrainEngine, published: WeightHandle) -> None:
    shapes = [parameter.shape for name, parameter in trainer.model.named_parameters() if ".lora_" in name]
    assert published.nbytes == 4 * sum(shape.numel() for shape in shapes)
    whole = sum(tensor.nbytes for _, tensor in trainer.gathered_parameters())
    assert published.nbytes < whole / 3


@pytest.mark.nightly
def test_a_request_in_flight_continues_with_newly_received_adapters(
    model: Path, trainer: TrainEngine, published: WeightHandle
) -> None:
    prompt = [3, 5, 8]

    async def run() -> tuple[list[int], list[float], list[int]]:
        engine = await AsyncVLLMEngine.open(model, CONFIG)
        try:
            request = engine.submit(prompt, SamplingConfig(max_new_tokens=POSITIONS - 8))
            pieces = aiter(request)
            for _ in range(5):
                await anext(pieces)
            await engine.receive(published, verify=True)
            drawn = await request.result()
        finally:
            engine.close()
        return drawn.tokens, drawn.logprobs, drawn.versions

    tokens, logprobs, versions = asyncio.run(run())
    batch = Batch.from_rows({"tokens": [[*prompt, *tokens]]})
    logprobs_T = torch.tensor(logprobs)
    changed = versions.index(3)
    assert versions == [0] * changed + [3] * (len(tokens) - changed)
    compute = partial(policy_logprobs, temperature=1.0)
    old, new = (trainer.forward(batch, compute, adapters=on)[len(prompt) :] for on in (False, True))
    assert (old - logprobs_T)[:changed].abs().max() < 1e-4
    assert (new - logprobs_T)[changed:].abs().max() < 1e-4


def test_adapters_of_another_model_are_refused_before_loading() -> None:
    layer = "model.layers.0.mlp.down_proj"
    parameters = {f"{layer}.weight": (1, (8, 24))}
    a, b = f"base_model.model.{layer}.lora_A.weight", f"base_model.model.{layer}.lora_B.weight"
    assert adapter_misfit({a: (2, 24), b: (8, 2)}, parameters) == ""
    assert "[8, 24]" in adapter_misfit({a: (2, 23), b: (8, 2)}, parameters)
    assert "[8, 24]" in adapter_misfit({a: (2, 24), b: (7, 2)}, parameters)
    assert "none" in adapter_misfit({a.replace("down", "up"): (2, 24)}, parameters)


def test_adapter_ranks_above_the_maximum_of_vllm_are_refused() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert adapter_arguments(0) == {}
    assert adapter_arguments(8)["max_lora_rank"] == 8
    assert adapter_arguments(9)["max_lora_rank"] == 16
    most = max(get_args(MaxLoRARanks))
    assert most == MOST_LORA_RANK
    with pytest.raises(ValueError, match=says(f"lora_rank={most + 1}", most, "rollout.merge_lora")):
        adapter_arguments(most + 1)


def test_a_model_without_adaptable_layers_is_refused_by_name() -> None:
    facts = says(".layers.0.", "h.0.attn.weight", "rollout.merge_lora")
    with pytest.raises(ValueError, match=facts), no_change({"h.0.attn.weight": (1, (4, 4))}, rank=2):
        raise AssertionError("there are no such adapters")


def test_families_with_adapter_transfer_are_native_to_vllm(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    for family in HOLD_ADAPTERS:
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
        loaded = ModelRegistry._try_load_model_cls(architecture)
        assert loaded is not None
        assert supports_lora(loaded), family
        AutoConfig.for_model(family).save_pretrained(tmp_path / family)
        assert VLLMRolloutConfig.adapters_fault(str(tmp_path / family), 8, False) == ""
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path / "gpt2")
    assert "gpt2" in VLLMRolloutConfig.adapters_fault(str(tmp_path / "gpt2"), 8, False)
    assert "not known" in VLLMRolloutConfig.adapters_fault(str(tmp_path / "nowhere"), 8, False)
    assert VLLMRolloutConfig.adapters_fault(str(tmp_path / "nowhere"), 8, True) == ""
    assert "hf" in HFRolloutConfig.adapters_fault(str(tmp_path / "qwen2"), 8, False)

"""Attention of one new token per row, and the tokens that an engine samples with and without it."""

from pathlib import Path

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from components.batch import Batch
from components.generate import hf_engine
from components.generate.config import SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from plugins.fast_decode import attention as decode_attention
from plugins.fast_decode.attention import _grouped_decoding
from plugins.fast_decode.decoding import FastDecoding


def completions(batch: Batch) -> list[list[int]]:
    return [batch.row(i, "tokens")[batch.row(i, "action_mask")].tolist() for i in range(len(batch))]


@pytest.mark.parametrize("capacity", [5, 9, 300])
@pytest.mark.parametrize("layout", ["whole", "other heads between", "expanded", "from its second place"])
def test_attention_over_grouped_heads_equals_attention_over_repeated_ones(layout: str, capacity: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 1, 8, generator=generator)
    key, value = torch.randn(2, 3, 2, capacity, 8, generator=generator)
    if layout == "other heads between":
        key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    elif layout == "expanded":
        key, value = (x[:1, :1].expand(3, 2, -1, -1) for x in (key, value))
    first = 1 if layout == "from its second place" else 0
    key, value = (x[:, :, first : first + 4] for x in (key, value))
    mask_R11S = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()[:, None, None]
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # pyright: ignore[reportArgumentType]
    for mask in (mask_R11S, None):
        grouped, _ = _grouped_decoding(module, query, key, value, mask, scaling=0.3)
        repeated, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
        torch.testing.assert_close(grouped, repeated)


def test_decoding_in_bfloat16_is_no_further_from_exact_attention_than_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(64, 4, 1, 32, generator=generator).bfloat16()
    key, value = torch.randn(2, 64, 2, 256, 32, generator=generator).bfloat16()[..., :200, :]
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # pyright: ignore[reportArgumentType]
    exact, _ = sdpa_attention_forward(module, query.double(), key.double(), value.double(), None, scaling=0.3)
    grouped, _ = _grouped_decoding(module, query, key, value, None, scaling=0.3)
    torchs, _ = sdpa_attention_forward(module, query, key, value, None, scaling=0.3)
    assert grouped.dtype == torch.bfloat16
    error, torch_error = ((x.double() - exact).abs().mean() for x in (grouped, torchs))
    assert 0 < error <= torch_error


def test_decoding_with_two_products_samples_the_same_tokens_as_torch_attention(
    untied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # more positions than the first allocation, and finished rows leave
    sampling = SamplingConfig(max_new_tokens=40, seed=3)
    rows = [[2, 9, 4], [5], [7, 8, 6, 2, 3]] * 4
    prompts = Batch.from_rows({"tokens": rows}, {"prompt_id": [0, 1, 2] * 4, "sample_id": list(range(12))})
    calls: list[int] = []
    by_two_products = decode_attention._by_two_products
    spy = lambda *call: calls.append(len(call[0])) or by_two_products(*call)
    monkeypatch.setattr(decode_attention, "_by_two_products", spy)
    by_products = HFRolloutEngine(untied_model).generate(prompts, sampling)
    assert calls[-1] < calls[0] and len(calls) > 40
    monkeypatch.setattr(decode_attention, "_MOST_POSITIONS", 0)
    by_torch = HFRolloutEngine(untied_model).generate(prompts, sampling)
    assert completions(by_products) == completions(by_torch)
    torch.testing.assert_close(by_products["rollout_logprob"], by_torch["rollout_logprob"], rtol=0, atol=1e-5)


def test_without_the_plug_in_an_engine_samples_the_same_tokens(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingConfig(max_new_tokens=40, seed=3)
    rows = [[2, 9, 4], [5], [7, 8, 6, 2, 3]] * 4
    prompts = Batch.from_rows({"tokens": rows}, {"prompt_id": [0, 1, 2] * 4, "sample_id": list(range(12))})
    fast = HFRolloutEngine(tied_model)
    assert isinstance(fast._decoding, FastDecoding)
    with_plugin = fast.generate(prompts, sampling)
    monkeypatch.setattr(hf_engine, "find", lambda kind, name: None)
    plain = HFRolloutEngine(tied_model)
    assert not isinstance(plain._decoding, FastDecoding)
    without_plugin = plain.generate(prompts, sampling)
    assert completions(without_plugin) == completions(with_plugin)
    logprobs = (drawn["rollout_logprob"] for drawn in (without_plugin, with_plugin))
    torch.testing.assert_close(*logprobs, rtol=0, atol=1e-5)

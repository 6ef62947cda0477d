"""Operations of a training step, counted by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from components.models.packing.layout import ComputedTokens
from plugins.utilisation.utilisation import peak_flops, power_watts, training_flops

COMPUTED = ComputedTokens(places=8, pairs=9 + 25)
"""Two sequences, of 3 and 5 tokens."""


def model(tied: bool) -> Qwen2ForCausalLM:
    """Return a model with 2 layers, 2 heads of dimension 4 and a vocabulary of 10 tokens."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=10,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
    )


# Per layer: query 8 x 8 + 8, key and value 4 x 8 + 4 each, output 8 x 8, three MLP matrices of 8 x 16, two norms of 8.
LAYER = 72 + 36 + 36 + 64 + 3 * 128 + 16
PRODUCTS = 2 * LAYER + 8 + 80
ATTENTION = 6 * 2 * 8 * (9 + 25)


@pytest.mark.parametrize("tied", [True, False])
def test_each_matrix_weight_counts_6_flops_per_token_and_an_embedding_none(tied: bool) -> None:
    assert training_flops(model(tied), COMPUTED) == 6 * PRODUCTS * 8 + ATTENTION


def test_a_frozen_weight_has_no_flops_for_its_gradient() -> None:
    policy = model(tied=False)
    policy.requires_grad_(False)
    assert training_flops(policy, COMPUTED) == 4 * PRODUCTS * 8 + ATTENTION


def test_peak_flops_are_selected_by_the_device_name() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA GeForce GTX 970") is None


def test_without_nvml_power_readings_there_is_no_metric_and_no_error() -> None:
    assert not torch.cuda.is_available()
    assert power_watts() is None

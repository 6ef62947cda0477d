"""plugins/layer_kernels: fused norms, activations and rotary embeddings equal the plain ones, and move few bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from plugins.layer_kernels import gate, norm, rotary
from plugins.layer_kernels.replace import use_layer_kernels
from tests.plugins.kernels.conftest import compiled, result_of, start
from tests.plugins.kernels.moved_bytes import MovedBytes

TOKENS = 4096


@pytest.mark.full
def test_fused_layers_equal_float64_as_closely_as_plain_ones() -> None:
    for name, errors in result_of(start("layers")).items():
        for fused, plain in zip(errors["fused"], errors["plain"], strict=True):
            if name.endswith("float32"):
                assert fused < 1e-5, name
            else:
                assert fused <= plain * 1.01, name


@pytest.mark.full
def test_heads_may_be_more_than_2_31_numbers_apart() -> None:
    assert result_of(start("far")) == [8, 16, 24]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_gpus(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tensors = dict.fromkeys(("x", "weight", "result", "grad", "cos", "sin", "gate", "up", "gate_grad", "up_grad"))
    types: dict[str, str] = dict.fromkeys(tensors, f"*{dtype}")
    types |= {"inverse": "*fp32", "sums": "*fp32", "eps": "fp32"}
    kernels: list[tuple[Any, dict[str, Any]]] = [
        (norm._forward_kernel, {"OFFSET": 1.0, "ROWS": 4, "BLOCK": 1024}),
        (norm._backward_kernel, {"OFFSET": 0.0, "SUMS": True, "ROWS": 4, "BLOCK": 1024}),
        (gate._forward_kernel, {"GELU": True, "BLOCK": 1024}),
        (gate._backward_kernel, {"GELU": True, "BLOCK": 1024}),
        (gate._backward_kernel, {"GELU": False, "BLOCK": 1024}),
        (rotary._kernel, {"BACKWARD": False, "HEADS": 16, "HALF": 64}),
        (rotary._kernel, {"BACKWARD": True, "HEADS": 1, "HALF": 32}),
    ]
    for kernel, constants in kernels:
        numbers: dict[str, str] = dict.fromkeys(kernel.arg_names, "i32")
        assert compiled(kernel, numbers | types, constants, 90)


def moved_bytes(model: Any) -> float:
    """Return the bytes per token of the norms, the gated activation and the rotary embedding of the first layer."""
    layer = model.model.layers[0]
    config = model.config
    rotate = layer.self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(layer.mlp, name, nn.Identity())

    def states(*shape: int) -> Tensor:
        return torch.empty(1, *shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    heads, keys, size = config.num_attention_heads, config.num_key_value_heads, 64
    angle = torch.empty(1, TOKENS, size, dtype=torch.bfloat16, device="meta")
    with MovedBytes() as moved:
        for norms in (layer.input_layernorm, layer.post_attention_layernorm):
            norms(states(TOKENS, config.hidden_size)).backward(states(TOKENS, config.hidden_size))
        layer.mlp(states(TOKENS, config.intermediate_size)).backward(states(TOKENS, config.intermediate_size))
        q, k = states(TOKENS, heads, size).transpose(1, 2), states(TOKENS, keys, size).transpose(1, 2)
        torch.autograd.backward(rotate(q, k, angle, angle), [states(heads, TOKENS, size), states(keys, TOKENS, size)])
    return moved.total / TOKENS


def small_layers() -> nn.Module:
    """Return a model with a layer of 0.5 billion parameters' sizes on the meta device."""
    sizes: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 1, "vocab_size": 100}
    heads: dict[str, Any] = {"num_attention_heads": 14, "num_key_value_heads": 2}
    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).bfloat16()


def test_fused_layers_move_at_most_a_third_of_the_bytes() -> None:
    plain, fused = small_layers(), small_layers()
    assert use_layer_kernels(fused) == []
    assert 3 * moved_bytes(fused) <= moved_bytes(plain)


def test_modules_without_a_kernel_stay_plain_and_are_named() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
    gpt2: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=16, n_layer=2, n_head=2))
    assert use_layer_kernels(gpt2) == ["5 LayerNorm", "2 GPT2Attention", "2 GPT2MLP"]
    assert not any("forward" in vars(module) for module in gpt2.modules())
    odd: Any = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, intermediate_size=32, hidden_act="relu"))
    assert use_layer_kernels(odd) == ["2 Qwen2MLP"]


def test_other_models_of_the_same_class_stay_plain() -> None:
    plain = apply_rotary_pos_emb
    use_layer_kernels(small_layers())
    other: Any = small_layers()
    assert not any("forward" in vars(module) for module in other.modules())
    assert type(other.model.layers[0].self_attn).forward.__globals__["apply_rotary_pos_emb"] is plain

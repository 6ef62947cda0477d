"""A small model is written from config.json alone, and keeps everything but its size."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from plugins.shrink.folder import shrunk_model
from plugins.shrink.sizes import small_config
from tests.large_models import CONFIGS, large_model

SIZES = {
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "max_window_layers",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_only_sizes_of_a_config_change(name: str) -> None:
    config = CONFIGS[name]
    small = small_config(config)
    assert small.keys() == config.keys()
    assert {field for field in config if small[field] != config[field]} <= SIZES
    assert small["num_attention_heads"] > small["num_key_value_heads"] == 2


def test_layers_of_each_kind_stay_with_their_lists() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    small = small_config({"num_hidden_layers": 6, "num_attention_heads": 8, "hidden_size": 64, "layer_types": kinds})
    assert small["layer_types"] == ["sliding_attention", "full_attention"]
    assert small["num_hidden_layers"] == 2


def test_a_mixture_keeps_several_experts_and_a_config_within_a_config_is_reduced() -> None:
    small = small_config({"model_type": "outer", "text_config": CONFIGS["Qwen3-30B-A3B"]})["text_config"]
    assert (small["num_experts"], small["num_experts_per_tok"], small["vocab_size"]) == (4, 2, 151936)


def test_a_folder_without_weights_becomes_a_model_that_loads(tmp_path: Path) -> None:
    source = large_model(tmp_path / "large", "Qwen2.5-0.5B")
    parameters = shrunk_model(str(source), tmp_path / "small", {"rope_theta": 5000.0})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters < 1e7
    assert model.config.tie_word_embeddings
    assert json.loads((tmp_path / "small" / "config.json").read_text())["rope_theta"] == 5000.0
    assert AutoTokenizer.from_pretrained(tmp_path / "small")("ab")["input_ids"] == [64, 65]
    assert GenerationConfig.from_pretrained(tmp_path / "small").eos_token_id == [151645, 151643]
    assert sorted(path.name for path in source.glob("*.safetensors")) == []


def test_a_folder_without_config_and_an_impossible_architecture_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        shrunk_model(str(tmp_path / "empty"), tmp_path / "small")
    source = large_model(tmp_path / "large", "Qwen2.5-0.5B", model_type="unheard_of")
    with pytest.raises(ValueError, match="a small copy of the model cannot be made"):
        shrunk_model(str(source), tmp_path / "odd")

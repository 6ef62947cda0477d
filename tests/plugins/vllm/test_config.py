"""Models and temperatures that vLLM supports. No test starts vLLM."""

import re
from pathlib import Path

import pytest

from tests.messages import says
from training.options.placement_options import PlacementOptions
from training.options.rollout_options import RolloutOptions

pytestmark = pytest.mark.full
"""vLLM must be installed, which is not the case in the default tier."""


def test_auto_selects_hf_for_temperatures_outside_of_the_range_of_vllm() -> None:
    options, line = RolloutOptions(temperature=2.5).chosen(8, "x")
    assert options.engine == "hf"
    assert re.search(says("hf", "vLLM", 0.01, 2.0, 2.5), line)
    with pytest.raises(ValueError, match=says("vllm", 0.005, "hf")):
        RolloutOptions(engine="vllm").chosen(8, "x", 0.005)
    assert RolloutOptions(engine="vllm").chosen(8, "x", 0.0)[0].engine == "vllm"


def test_auto_selects_hf_on_a_cpu_for_head_sizes_without_a_kernel(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 4}')
    assert RolloutOptions().chosen(1, str(tmp_path))[0].engine == "vllm"
    with pytest.raises(ValueError, match=says("vLLM", 32, 16, "hf")):
        RolloutOptions(engine="vllm").chosen(0, str(tmp_path))


def test_adapters_are_sent_separately_to_supporting_engines_and_merged_to_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    placement = PlacementOptions()
    for engine, option, merges, words in (
        ("vllm", None, False, "only the adapters"),
        ("vllm", True, True, "merged adapters"),
        ("hf", None, True, "hf holds whole weights"),
    ):
        options, line = RolloutOptions(engine=engine, merge_lora=option).chosen(8, str(tmp_path), lora_rank=4)
        assert options.merge_lora is merges
        assert words in line
        assert options.engine_config("fp32", 9, placement, lora_rank=4).lora_rank == (0 if merges else 4)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=says("rollout.merge_lora=false", "gpt2")):
        RolloutOptions(engine="vllm", merge_lora=False).chosen(8, str(tmp_path), lora_rank=4)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match=says("rollout.merge_lora=false", "train.lora_rank=513", 512)):
        RolloutOptions(engine="vllm", merge_lora=False).chosen(8, str(tmp_path), lora_rank=513)
    options, line = RolloutOptions(engine="vllm").chosen(8, str(tmp_path), lora_rank=513)
    assert options.merge_lora
    assert "513" in line
    options, line = RolloutOptions(engine="vllm").chosen(8, str(tmp_path), lora_rank=0)
    assert options.merge_lora is None
    assert "adapters" not in line

import importlib.util
import re
from pathlib import Path

import pytest

from components.generate.choice import choose_rollout_engine
from components.generate.config import HFRolloutConfig
from components.models.attention import attention_note, choose_attention
from plugins.vllm import config
from plugins.vllm.config import VLLMRolloutConfig
from tests.messages import says
from training.options.placement_options import PlacementOptions
from training.options.rollout_options import RolloutOptions
from training.options.schema import idle_options

NEEDS_VLLM = pytest.mark.full
"""vLLM must be installed, which is not the case in the default tier. No test starts it."""


@NEEDS_VLLM
def test_auto_selects_vllm_on_a_gpu_or_for_a_large_model_and_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "LARGE_BYTES", 100)
    reasons = []
    for choice, gpus, expected in (("auto", 0, "hf"), ("auto", 2, "vllm"), ("hf", 2, "hf")):
        name, reason = choose_rollout_engine(choice, gpus, str(tmp_path))
        assert name == expected
        reasons.append(reason)
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    name, reason = choose_rollout_engine("auto", 0, str(tmp_path))
    assert name == "vllm"
    assert len({*reasons, reason}) == 4
    assert all((*reasons, reason))


def test_without_vllm_auto_selects_hf_and_engine_vllm_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    name, reason = choose_rollout_engine("auto", 8, "x")
    assert name == "hf"
    assert "vLLM" in reason
    with pytest.raises(ValueError, match=says("scripts/setup.sh vllm", "hf")):
        choose_rollout_engine("vllm", 8, "x")
    with pytest.raises(ValueError, match=says("rollout.tensor_parallel=2", "vllm", "hf")):
        RolloutOptions(tensor_parallel=2).chosen(8, "x")


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"engine": "sglang"}, ["rollout.engine=sglang", "auto", "hf", "vllm"]),
        ({"engine": "hf", "tensor_parallel": 2}, ["rollout.tensor_parallel=2", "hf"]),
        ({"top_p": 0.0}, ["rollout.top_p=0.0", "above 0", "at most 1"]),
        ({"top_k": -1}, ["rollout.top_k=-1"]),
        ({"engine": "vllm", "gpu_memory": 1.5}, ["rollout.gpu_memory=1.5", 0, 1]),
        ({"engine": "vllm", "cpu_cache_gb": 0.0}, ["rollout.cpu_cache_gb=0.0", 0]),
    ],
)
def test_invalid_sampling_options_are_named(options: dict[str, object], facts: list[object]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        RolloutOptions(**options)  # pyright: ignore[reportArgumentType]


def test_options_reach_the_engine_and_evaluation_samples_from_the_full_vocabulary() -> None:
    options = RolloutOptions(engine="vllm", top_p=0.9, top_k=5, max_new_tokens=20, tensor_parallel=2)
    shared = PlacementOptions(engines_sleep=True)
    made = options.engine_config("bf16", 100, shared, lora_rank=0)
    assert made == VLLMRolloutConfig(
        dtype="bfloat16",
        max_num_seqs=512,
        max_model_len=120,
        tensor_parallel_size=2,
        gpu_memory_utilization=0.45,
        enable_sleep=True,
        check_every=50,
        precision="bfloat16",
    )
    shares = {
        0.9: PlacementOptions(colocate=False),
        0.45: PlacementOptions(),
        0.7: PlacementOptions(engines_sleep=True, learners_sleep=True),
    }
    for share, placement in shares.items():
        engine_config = options.engine_config("bf16", 100, placement, lora_rank=0)
        assert isinstance(engine_config, VLLMRolloutConfig)
        assert engine_config.gpu_memory_utilization == share
    assert isinstance(RolloutOptions(engine="hf").engine_config("fp32", 9, shared, lora_rank=8), HFRolloutConfig)
    trained, inferred = options.sampling(1, 2), options.sampling(1, 2, 0.6)
    assert (trained.top_p, trained.top_k, trained.is_full_vocabulary) == (0.9, 5, False)
    assert (inferred.top_p, inferred.top_k, inferred.temperature, inferred.is_full_vocabulary) == (1.0, 0, 0.6, True)


def test_notes_warn_of_a_narrowed_distribution_and_of_options_without_effect() -> None:
    (note,) = RolloutOptions(top_p=0.9).notes()
    assert "rollout.top_p=0.9" in note
    reasons = dict(idle_options(RolloutOptions(engine="hf", enforce_eager=True), "rollout."))
    assert re.search("engine.*hf", reasons["rollout.enforce_eager"])
    on_vllm = RolloutOptions(engine="vllm", enforce_eager=True)
    assert "rollout.enforce_eager" not in dict(idle_options(on_vllm, "rollout."))


def test_engines_of_two_devices_divide_the_devices_and_cores() -> None:
    apart = PlacementOptions(colocate=False).resolved(8, groups=2, tensor_parallel=2)
    assert (apart.actor_ranks, apart.rollout_engines) == (4, 2)
    together = PlacementOptions().resolved(8, groups=2, tensor_parallel=2)
    assert (together.actor_ranks, together.rollout_engines) == (8, 4)


def test_unavailable_flash_attention_is_replaced_by_sdpa_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    has: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in has else None)
    assert [choose_attention(attention, 0) for attention in ("auto", None, "eager")] == [None, None, "eager"]
    assert choose_attention("flash_attention_2", 0) == "sdpa"
    assert re.search(says("flash_attention_2", "GPU", "sdpa"), attention_note("flash_attention_2", 0))
    assert choose_attention("flash_attention_2", 8) == "sdpa"
    assert re.search(says("flash_attn", "sdpa"), attention_note("flash_attention_2", 8))
    has.append("flash_attn")
    assert [choose_attention(attention, 8) for attention in ("auto", "flash_attention_2")] == ["flash_attention_2"] * 2
    assert [attention_note(attention, 8) for attention in ("auto", None, "eager", "flash_attention_2")] == [""] * 4

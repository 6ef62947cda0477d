"""Engine arguments that a run passes to vLLM, and arguments that it refuses before the start."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from plugins.vllm.config import VLLMRolloutConfig
from plugins.vllm.options import engine_arguments
from plugins.vllm_arguments.table import ALLOWED, CORRECTED, REFUSED, SAMPLING, arguments, markdown
from recipes.grpo.config import GRPOConfig
from recipes.verl_ppo.config import VerlPPOConfig
from tests.architecture import ROOT
from tests.components.helpers.vllm_models import write_vllm_model
from tests.messages import says
from training.options.config import load_config
from training.options.schema import ConfigError

BASE = ["model.path=m", "data.path=task:sort", "run_dir=x", "rollout.engine=vllm", "train.precision=fp32"]
FP8 = "rollout.vllm.kv_cache_dtype=fp8"
NGRAM = "rollout.vllm.speculative_config={method: ngram, num_speculative_tokens: 3}"
TIS = "algorithm.correction=tis"


def read(*options: str) -> GRPOConfig:
    return load_config(GRPOConfig, [*BASE, *options])


def notes(*options: str, on_gpu: bool = False) -> str:
    return "\n".join(read(*options).engine_arguments().notes(on_gpu))


def test_values_are_yaml_with_or_without_an_equals_sign() -> None:
    options = ["rollout.vllm.block_size=32", "--rollout.vllm.async_scheduling", "false"]
    config = read(*options, "rollout.vllm.compilation_config={mode: 0, cudagraph_mode: NONE}")
    expected = {
        "block_size": 32,
        "async_scheduling": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"},
    }
    assert config.rollout.vllm == expected
    assert config.rollout_engine() == dataclasses.replace(read().rollout_engine(), arguments=expected)


def test_every_passed_argument_is_a_note_of_the_plan() -> None:
    text = notes("rollout.vllm.block_size=32", "rollout.vllm.max_num_batched_tokens=8192")
    assert re.search(says("rollout.vllm.block_size=32", "rollout.vllm.max_num_batched_tokens=8192", "speed"), text)


@pytest.mark.parametrize("name", sorted(name for name, each in arguments().items() if each.kind in (REFUSED, SAMPLING)))
def test_each_refused_argument_is_named_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=says(f"rollout.vllm.{name}=1", arguments()[name].why)):
        read(f"rollout.vllm.{name}=1")


def test_all_faults_are_raised_together_with_the_nearest_name_for_unknown_ones() -> None:
    facts = ("block_size", "rollout.gpu_memory", FP8, TIS, "rollout.accept_bias=true", "logprobs_mode")
    with pytest.raises(ConfigError, match=says(*facts)):
        read(
            *("rollout.vllm.blok_size=32", "rollout.vllm.gpu_memory_utilization=0.5", FP8),
            "rollout.vllm.logprobs_mode=raw_logprobs",
        )


def test_arguments_have_no_effect_with_hf_generation() -> None:
    text = notes("rollout.vllm.block_size=32", "rollout.engine=hf")
    assert re.search(says("no effect", "rollout.vllm.block_size", "hf"), text)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([TIS], "importance weights"),
        (["algorithm.correction=icepop"], "importance weights"),
        (["rollout.accept_bias=true"], "biased"),
    ],
)
def test_a_quantised_cache_needs_a_correction_or_an_explicit_option(options: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=says(FP8, TIS, "rollout.accept_bias=true")):
        read(FP8)
    text = notes(FP8, *options)
    assert FP8 in text
    assert word in text


def test_values_that_change_nothing_need_no_correction() -> None:
    engine: Any = read("rollout.vllm.kv_cache_dtype=auto", "rollout.vllm.dtype=auto").rollout_engine()
    assert (engine.dtype, engine.precision, engine.arguments) == ("float32", "float32", {})


def test_a_dtype_of_the_engine_is_part_of_its_configuration() -> None:
    engine: Any = read("rollout.vllm.dtype=bfloat16", TIS).rollout_engine()
    assert (engine.dtype, engine.weights_dtype, engine.arguments) == ("bfloat16", "bfloat16", {})
    with pytest.raises(ConfigError, match=says("rollout.vllm.dtype=float16", "float32", "bfloat16")):
        read("rollout.vllm.dtype=float16", TIS)


def test_quantised_weights_need_bfloat16_and_a_gpu() -> None:
    quantised = ["rollout.vllm.quantization=fp8", TIS]
    with pytest.raises(ConfigError, match=says("float32", "train.precision=bf16")):
        notes(*quantised, on_gpu=True)
    assert "8 bits" in notes(*quantised, "train.precision=bf16", on_gpu=True)
    with pytest.raises(ConfigError, match=says("CPU", "rollout.vllm.quantization=fp8")):
        notes(*quantised, "train.precision=bf16")
    # Its kernels exist on CPUs too.
    assert "8 bits" in notes("rollout.vllm.quantization=fp8_per_channel", TIS, "train.precision=bf16")
    with pytest.raises(ConfigError, match=says("rollout.vllm.quantization=awq", "fp8")):
        read("rollout.vllm.quantization=awq", TIS)


def test_speculative_decoding_is_refused_on_a_cpu_and_if_it_changes_tokens() -> None:
    with pytest.raises(ConfigError, match=says("CPU", "log-probabilities", "wrong")):
        notes(NGRAM, TIS)
    assert "drafted" in notes(NGRAM, TIS, on_gpu=True)
    for entry, facts in (
        ("method: eagle", ("eagle", "ngram")),
        ("num_speculative_tokens: 3", ("method", "ngram")),
        ("method: ngram, synthetic_acceptance_length: 2", ("wrong tokens",)),
        ("method: ngram, rejection_sample_method: block", ("distribution",)),
    ):
        with pytest.raises(ConfigError, match=says(*facts)):
            read(f"rollout.vllm.speculative_config={{{entry}}}", TIS)
    with pytest.raises(ConfigError, match="mapping"):
        read("rollout.vllm.speculative_config=ngram", TIS)


def test_chunked_prefill_and_batch_limits_that_end_requests_are_refused() -> None:
    chunked = "rollout.vllm.enable_chunked_prefill=true"
    with pytest.raises(ConfigError, match=says(chunked, "CPU", "seed")):
        notes(chunked)
    assert chunked in notes(chunked, on_gpu=True)
    assert "false" in notes("rollout.vllm.enable_chunked_prefill=false")
    with pytest.raises(ConfigError, match=says("max_num_batched_tokens=600", 1536)):
        notes("rollout.vllm.max_num_batched_tokens=600", "data.max_prompt_tokens=512")
    assert "=600" in notes("rollout.vllm.max_num_batched_tokens=600", on_gpu=True)


def test_the_policy_to_engine_ratio_counts_as_a_correction() -> None:
    config = load_config(VerlPPOConfig, [*BASE, FP8, "algorithm.bypass=true"])
    assert "correct the difference" in config.engine_arguments().notes(False)[0]


def test_the_page_on_engines_has_the_table() -> None:
    assert markdown() in (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.vllm
def test_the_table_has_every_argument_of_vllm_once_and_allowed_ones_reach_it(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields: dict[str, Any] = {each.name: each for each in dataclasses.fields(AsyncEngineArgs)}
    table = arguments()
    assert {name for name, each in table.items() if each.kind != SAMPLING} == fields.keys()
    model = write_vllm_model(tmp_path / "model", seed=1, tied=True)
    for name, argument in table.items():
        if argument.kind not in (ALLOWED, CORRECTED) or name == "dtype":
            continue
        value = argument.values[0] if argument.values else fields[name].default
        made = engine_arguments(model, VLLMRolloutConfig(arguments={name: value}))
        assert made[name] == value
        args = AsyncEngineArgs(**made)
        if not dataclasses.is_dataclass(getattr(args, name)):
            assert getattr(args, name) == value, name

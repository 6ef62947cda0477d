"""The vLLM engine in this process, compared with the hf engine and the trainer.

Legend: B sequences, N all tokens, V vocabulary.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from components.batch import Batch
from components.generate.config import EVALUATION_STEP, SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.generate.opening import open_rollout_engine
from components.models.causal import token_logprobs
from components.models.device import is_engine_dead
from components.models.loading import load_policy
from components.train.config import TrainConfig
from components.train.opening import open_engine
from components.weights.publisher import WeightPublisher
from plugins.vllm.config import VLLMRolloutConfig
from plugins.vllm.engine import VLLMRolloutEngine
from tests.components.conftest import write_model
from tests.components.helpers.vllm_models import (
    POSITIONS,
    answers_of,
    prompts_of,
    uneven_prompts,
    write_vllm_model,
)
from tests.messages import says

pytestmark = [pytest.mark.full, pytest.mark.vllm]
SMALL = VLLMRolloutConfig(cpu_cache_gb=0.25)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vllm_model(tmp_path_factory.mktemp("vllm") / "tied", seed=11, tied=True)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VLLMRolloutEngine]:
    engine = VLLMRolloutEngine(model, SMALL)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def hf(model: Path) -> HFRolloutEngine:
    return HFRolloutEngine(model)


def test_greedy_responses_equal_those_of_hf(engine: VLLMRolloutEngine, hf: HFRolloutEngine) -> None:
    sampling = SamplingConfig(temperature=0, max_new_tokens=12)
    actual, expected = (each.generate(uneven_prompts(20), sampling) for each in (engine, hf))
    assert answers_of(actual) == answers_of(expected)
    assert torch.equal(actual["truncated"], expected["truncated"])
    assert {row[-1] == 1 for row in answers_of(actual)} == {True, False}
    assert (actual["rollout_logprob"] - expected["rollout_logprob"]).abs().max() < 1e-4


def test_parts_of_a_generation_add_up_to_its_time(engine: VLLMRolloutEngine) -> None:
    engine.metrics()
    began = time.monotonic()
    engine.generate(uneven_prompts(32), SamplingConfig(max_new_tokens=16))
    took = time.monotonic() - began
    times = [value for name, value in engine.metrics().items() if name.startswith("timing_s/")]
    assert len(times) == 3
    # 15 of the 16 model steps have no first token.
    assert 0 < times[0] < times[1]
    assert 0.95 * took - 0.001 < sum(times) <= took
    engine.generate(uneven_prompts(2), SamplingConfig(max_new_tokens=2, step=EVALUATION_STEP))
    assert not any(value for name, value in engine.metrics().items() if name.startswith("timing_s/"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_agree_among_vllm_hf_and_both_training_engines(
    temperature: float, model: Path, engine: VLLMRolloutEngine, hf: HFRolloutEngine
) -> None:
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=16)
    for rollout in (engine, hf):
        responses = rollout.generate(uneven_prompts(64), sampling)
        for library, stage in (("deepspeed", 2), ("fsdp", 3)):
            trainer = open_engine(load_policy(model), TrainConfig(engine=library, zero_stage=stage))
            logprob_N = trainer.forward(responses, lambda m, batch: token_logprobs(m, batch, temperature).logprob_N)
            gap_N = (logprob_N - responses["rollout_logprob"])[responses["action_mask"]]
            assert gap_N.abs().max() < 1e-4, (type(rollout).__name__, library)


def test_tokens_depend_only_on_seed_step_prompt_and_sample(engine: VLLMRolloutEngine) -> None:
    prompts = uneven_prompts(40)
    sampling = SamplingConfig(max_new_tokens=10, seed=7, step=3)
    whole = answers_of(engine.generate(prompts, sampling))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled = answers_of(engine.generate(prompts.select(order), sampling))
    assert shuffled == [whole[i] for i in order.tolist()]
    # The arguments for two engines that share a GPU.
    assert answers_of(engine.generate(prompts.select(slice(0, 20)), sampling)) == whole[:20]
    for other in (SamplingConfig(max_new_tokens=10, seed=8, step=3), SamplingConfig(max_new_tokens=10, seed=7, step=4)):
        assert answers_of(engine.generate(prompts, other)) != whole
    sample = prompts.with_sequences(sample_id=torch.ones(40, dtype=torch.int64))
    assert answers_of(engine.generate(sample, sampling)) != whole


def test_more_seeded_prompts_than_the_batch_limit_do_not_crash_the_engine(engine: VLLMRolloutEngine) -> None:
    # 180 x 100 = 18,000 tokens, and 16,384 per prefill: vLLM would split one of the prompts, which it cannot do with
    # seeds.
    rows = [[2 + (i + 7 * t) % 18 for t in range(100)] for i in range(180)]
    responses = engine.generate(prompts_of(rows), SamplingConfig(max_new_tokens=2))
    assert len(responses) == 180
    assert int(responses["action_mask"].sum()) >= 180


@pytest.mark.parametrize(("top_p", "top_k"), [(0.6, 0), (1.0, 3), (0.7, 4)])
def test_top_p_and_top_k_give_the_tokens_and_log_probabilities_of_hf(
    top_p: float, top_k: int, engine: VLLMRolloutEngine, hf: HFRolloutEngine
) -> None:
    sampling = SamplingConfig(temperature=0.8, top_p=top_p, top_k=top_k, max_new_tokens=1)
    prompt = [3, 5, 8]
    drawn: dict[str, dict[int, float]] = {}
    for rollout in (engine, hf):
        responses = rollout.generate(prompts_of([prompt] * 300), sampling)
        mask_N = responses["action_mask"]
        tokens, logprobs = responses["tokens"][mask_N].tolist(), responses["rollout_logprob"][mask_N].tolist()
        drawn[type(rollout).__name__] = dict(zip(tokens, logprobs, strict=True))
    actual, expected = drawn.values()
    assert actual.keys() == expected.keys()
    assert 1 < len(actual) <= (top_k or 20)
    assert all(abs(actual[token] - expected[token]) < 1e-5 for token in actual)
    # Probabilities are those after truncation: together they sum to 1.
    assert abs(float(torch.tensor(list(actual.values())).exp().sum()) - 1) < 1e-4


def test_prompts_keep_their_columns_and_an_empty_batch_gives_an_empty_batch(engine: VLLMRolloutEngine) -> None:
    prompts = uneven_prompts(3).with_objects(label=["a", "b", "c"])
    assert engine.generate(prompts, SamplingConfig(max_new_tokens=2))["label"] == ["a", "b", "c"]
    none = engine.generate(prompts.select(slice(0, 0)), SamplingConfig(max_new_tokens=2))
    assert (len(none), none.num_tokens) == (0, 0)


def test_weights_that_do_not_fit_are_refused_without_changes(
    model: Path, engine: VLLMRolloutEngine, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says("prompt 0", "3 tokens", f"max_new_tokens={POSITIONS}")):
        engine.generate(prompts_of([[2, 3, 4]]), SamplingConfig(max_new_tokens=POSITIONS))
    before = engine.generate(uneven_prompts(4), SamplingConfig(temperature=0))
    weights = load_policy(write_vllm_model(tmp_path / "untied", seed=2, tied=False)).state_dict()
    publisher = WeightPublisher(tmp_path / "w")
    with pytest.raises(ValueError, match=says("version 1", "q_proj.weight")):
        engine.receive(publisher.publish(1, list(weights.items())[:2]))
    assert engine.weight_version == 0
    assert answers_of(engine.generate(uneven_prompts(4), SamplingConfig(temperature=0))) == answers_of(before)


def test_sleep_on_a_cpu_notes_that_no_memory_is_freed_and_blocks_generation_until_wake(
    engine: VLLMRolloutEngine,
) -> None:
    assert engine.sleep() == 0
    with pytest.raises(ValueError, match=r"wake\(\)"):
        engine.generate(uneven_prompts(1), SamplingConfig())
    engine.wake()
    assert len(engine.generate(uneven_prompts(1), SamplingConfig())) == 1


def test_an_engine_does_not_change_random_state_threads_or_default_dtype(model: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine = open_rollout_engine(model, VLLMRolloutConfig(cpu_cache_gb=0.1, enable_prefix_caching=False))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_default_dtype() == torch.float32
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    # Tokens are the same without a prefix cache.
    shared = prompts_of([[3, 5, 8, *([7] * 60), i] for i in range(8)])
    sampling = SamplingConfig(max_new_tokens=6)
    cached = open_rollout_engine(model, SMALL)
    assert answers_of(engine.generate(shared, sampling)) == answers_of(cached.generate(shared, sampling))
    cached.close()
    engine.close()


def test_head_sizes_without_a_kernel_are_refused_before_the_engine_starts(tmp_path: Path) -> None:
    small = write_model(tmp_path / "small", seed=1, tied=True)
    with pytest.raises(ValueError, match=says(small, 16, 32, "hf")):
        VLLMRolloutEngine(small, SMALL)


@pytest.mark.nightly
def test_an_engine_killed_during_generation_raises_an_engine_dead_error(model: Path) -> None:
    separate = VLLMRolloutEngine(model, VLLMRolloutConfig(cpu_cache_gb=0.25, own_process=True))
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    (core,) = [pid for pid in pids if b"VLLM::" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    step = separate._llm.llm_engine.step

    def deadly_step() -> Any:
        os.kill(core, signal.SIGKILL)
        return step()

    separate._llm.llm_engine.step = deadly_step
    prompts = Batch.from_rows({"tokens": [[4, 5], [6]]}, {"prompt_id": [0, 1], "sample_id": [0, 0]})
    with pytest.raises(Exception, match="EngineCore") as raised:
        separate.generate(prompts, SamplingConfig(max_new_tokens=16))
    assert is_engine_dead(raised.value)

"""The hf engine with times of the parts of generation."""

import time
from pathlib import Path

import torch

from components.batch import Batch
from components.generate.config import EVALUATION_STEP, HFRolloutConfig, SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.generate.opening import open_rollout_engine
from plugins.generation_times.engine import TimedHFEngine
from tests.components.conftest import write_model

PROMPTS = Batch.from_rows(
    {"tokens": [[2, 3 + i % 5, 4] for i in range(24)]},
    {"prompt_id": [i // 2 for i in range(24)], "sample_id": [i % 2 for i in range(24)]},
)


def test_parts_of_a_generation_add_up_and_tokens_are_those_of_the_engine_without_times(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=3, tied=True)
    config = HFRolloutConfig(max_num_seqs=10)
    engine = open_rollout_engine(model, config)
    assert isinstance(engine, TimedHFEngine)
    sampling = SamplingConfig(max_new_tokens=8, step=1)
    began = time.monotonic()
    responses = engine.generate(PROMPTS, sampling)
    took = time.monotonic() - began
    times = {name: value for name, value in engine.metrics().items() if name.startswith("timing_s/")}
    assert list(times) == [f"timing_s/generate_{part}" for part in ("prefill", "decode", "objects")]
    assert min(times.values()) > 0
    assert 0.9 * took - 0.001 < sum(times.values()) <= took
    plain = HFRolloutEngine(model, config).generate(PROMPTS, sampling)
    assert all(torch.equal(responses[name], plain[name]) for name in ("tokens", "rollout_logprob"))
    engine.generate(PROMPTS, SamplingConfig(max_new_tokens=2, step=EVALUATION_STEP))
    assert not any(value for name, value in engine.metrics().items() if name.startswith("timing_s/"))

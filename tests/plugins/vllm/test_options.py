"""Start-up arguments of vLLM on GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plugins.vllm.config import VLLMRolloutConfig
from plugins.vllm.options import engine_arguments, prepare_process
from tests.components.conftest import write_model
from tests.components.helpers.fake_gpus import FakeGPUs


def test_on_gpus_prefill_is_chunked_and_the_engine_has_its_memory_share(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=1, tied=True, positions=40_000)
    config = VLLMRolloutConfig(gpu_memory_utilization=0.45, enable_sleep=True)
    arguments = engine_arguments(model, config, on_gpu=True)
    assert "enable_chunked_prefill" not in arguments  # vLLM's own choice
    assert (arguments["max_model_len"], arguments["max_num_batched_tokens"]) == (40_000, 16_384)
    assert (arguments["gpu_memory_utilization"], arguments["enable_sleep_mode"]) == (0.45, True)


def test_preparing_the_process_of_an_engine_creates_no_cuda_context_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = FakeGPUs(monkeypatch, count=8)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    prepare_process(VLLMRolloutConfig(tensor_parallel_size=8), in_process=True)
    assert gpus.contexts == 0

"""Computation never falls back to the CPU silently, and some errors make an engine unusable."""

from pathlib import Path

import pytest
import torch

from components.batch import Batch
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.opening import open_rollout_engine
from components.models.device import compute_device, is_engine_dead
from components.models.disk.weight_files import fill
from components.models.loading import load_policy
from components.process import heartbeat
from components.weights.publisher import WeightPublisher, read_weights
from tests.messages import says

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU here")


@no_gpu
def test_a_process_with_an_assigned_gpu_that_torch_cannot_use_raises_an_error(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(RuntimeError, match=says("GPU 3", "CUDA_VISIBLE_DEVICES", torch.__version__, "CPU")):
        open_rollout_engine(tied_model, HFRolloutConfig())
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert compute_device() == torch.device("cpu")


def test_out_of_memory_and_dead_processes_end_an_engine_and_other_errors_do_not() -> None:
    with pytest.raises(RuntimeError) as no_room:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_engine_dead(no_room.value)
    with pytest.raises(RuntimeError) as misfit:
        torch.matmul(torch.empty(2), torch.empty(3))
    assert not is_engine_dead(misfit.value)
    profiling = AssertionError("Error in memory profiling. Initial free memory 82.67 GiB, current free memory 132 GiB.")
    dead = (torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError("Executor failed."), profiling)
    for error in dead:
        assert is_engine_dead(error)
    for error in (ValueError("the prompt is too long"), FileNotFoundError("version 3"), TimeoutError()):
        assert not is_engine_dead(error)


def test_each_read_tensor_sampled_token_and_sent_tensor_reports_progress(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_listeners", [])
    heard: list[None] = []
    heartbeat.listen(lambda: heard.append(None))
    policy = load_policy(tied_model, empty=True)
    fill(policy, "cpu")
    assert len(heard) == len(list(policy.parameters()))
    engine = open_rollout_engine(tied_model, HFRolloutConfig())
    heard.clear()
    prompts = Batch.from_rows({"tokens": [[4, 5], [6]]}, {"prompt_id": [0, 1], "sample_id": [0, 0]})
    drawn = engine.generate(prompts, SamplingConfig(max_new_tokens=9))
    longest = int((drawn.lengths - drawn["prompt_length"]).max())
    assert len(heard) == longest > 1
    heard.clear()
    publisher = WeightPublisher(tmp_path)
    handle = publisher.publish(1, [("a", torch.ones(3)), ("b", torch.ones(4))])
    written = len(heard)
    assert written >= 1
    assert [name for name, _ in read_weights(handle)] == ["a", "b"]
    assert len(heard) - written >= 2
    publisher.close()

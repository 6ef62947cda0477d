"""A fault that is planted in a vLLM engine after a weight sync is detected, and the group of layers is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from components.models.layer_marks import first_difference, group_of
from components.models.loading import load_policy
from components.train.config import TrainConfig
from components.train.engine import TrainEngine
from components.train.opening import open_engine
from components.weights.publisher import WeightHandle, WeightPublisher
from plugins.engine_check.check import LIMITS, EngineCheck, EngineMismatch
from plugins.engine_check.probe import SEQUENCES, TOKENS, EngineProbe, Probe
from tests.messages import says
from tests.plugins.vllm.families import change, write_family

TRAIN = TrainConfig()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen2_moe", tmp_path_factory.mktemp("check") / "model")


def probe_of(logprobs: list[list[float]]) -> Probe:
    return Probe([[3, 4, 5], [6, 7, 8]], logprobs, {})


def test_the_first_and_every_nth_later_version_are_checked() -> None:
    check, probe = EngineCheck(3, "float32"), probe_of([])
    checked = []
    for version in range(1, 8):
        check.received()
        if "check_due" in check.metrics:
            assert check.next(probe, False) is probe
            checked.append(version)
        # Other engines' probes change nothing.
        assert check.next(probe, False) is None
        assert "check_due" not in check.metrics
    assert checked == [1, 4, 7]


def test_a_check_that_got_no_probe_remains_due() -> None:
    check, probe = EngineCheck(3, "float32"), probe_of([])
    check.received()
    check.received()
    assert check.metrics == {"check_due": 1.0}
    assert check.next(None, False) is None
    assert check.next(probe, False) is probe
    assert check.metrics == {}


def test_a_sleeping_engine_is_checked_with_the_newest_version_when_it_wakes() -> None:
    check, old_probe, new_probe = EngineCheck(50, "float32"), probe_of([]), probe_of([])
    check.received()
    assert check.next(old_probe, True) is None
    assert check.metrics == {}
    check.received()
    assert check.metrics == {"check_due": 1.0}
    assert check.next(None, False) is None
    assert check.next(new_probe, True) is None
    assert check.next(None, False) is new_probe
    assert check.next(None, False) is None


def test_differences_beyond_the_precision_and_nan_are_unexplained() -> None:
    probe = probe_of([[-1.0, -2.0], [-3.0, -4.0]])
    for dtype, limit in LIMITS.items():
        check = EngineCheck(1, dtype)
        assert check.metrics == {}
        # An engine with few positions computes only the first tokens.
        assert check.is_explained(check.gap(probe, [[-1.0, -2.0 - limit], [-3.0]]))
        assert check.metrics["check_gap_limit"] == limit
        assert check.metrics["check_gap_max"] == pytest.approx(limit, rel=1e-3)
        assert check.metrics["check_gap_mean"] == pytest.approx(limit / 3, rel=1e-3)
        assert not check.is_explained(check.gap(probe, [[-1.0, -2.0], [-3.0, -4.0 - 5 * limit]]))
        assert not check.is_explained(check.gap(probe, [[-1.0, float("nan")], [-3.0, -4.0]]))


@pytest.mark.parametrize(
    ("module", "group"),
    [
        ("model.layers.3.self_attn", "layer 3, attention"),
        ("model.layers.3.attn", "layer 3, attention"),
        ("model.layers.0.block_sparse_moe", "layer 0, feed-forward block or experts"),
        ("model.layers.0.mlp.experts", ""),
        ("model.layers.3.attn.attn", ""),
        ("model.embed_tokens", "embeddings"),
        ("model.norm", "final norm"),
        ("model.layers.1.input_layernorm", ""),
        ("lm_head", ""),
    ],
)
def test_modules_are_grouped_into_layers_by_name(module: str, group: str) -> None:
    assert group_of(module) == group


def test_the_first_differing_group_is_named_and_incomparable_shapes_are_skipped() -> None:
    ones = torch.ones(2, 4)
    expected = {"embeddings": ones, "layer 0, attention": ones, "layer 1, attention": ones, "final norm": ones}
    actual = {"layer 0, attention": ones[:1], "layer 1, attention": ones * 1.5, "final norm": ones * 2}
    assert first_difference(expected, actual, 0.1) == "layer 1, attention (relative difference 0.5)"
    assert first_difference(expected, {"final norm": ones * float("nan")}, 0.1).startswith("final norm")
    assert first_difference(expected, {}, 0.1) == ""


@pytest.mark.parametrize("packing", [False, True])
def test_a_probe_is_equal_with_packing_padding_and_micro_batches(model: Path, packing: bool) -> None:
    expected = EngineProbe(open_engine(load_policy(model), TRAIN)).measure()
    assert len(expected.tokens) == SEQUENCES
    assert {len(row) for row in expected.logprobs} == {TOKENS - 1}
    assert [group for group in expected.marks if "layer 1" in group] == [
        "layer 1, attention",
        "layer 1, feed-forward block or experts",
    ]
    split = replace(TRAIN, max_tokens=2 * TOKENS)
    actual = EngineProbe(open_engine(load_policy(model, packing=packing), split)).measure()
    assert torch.allclose(torch.tensor(actual.logprobs), torch.tensor(expected.logprobs), atol=1e-5)
    assert first_difference(expected.marks, actual.marks, 1e-5) == ""
    assert actual.marks.keys() == expected.marks.keys()


# --- with vLLM


@pytest.fixture(scope="module")
def trainer(model: Path) -> TrainEngine:
    return open_engine(load_policy(model), TRAIN)


@pytest.fixture(scope="module")
def engine(model: Path, trainer: TrainEngine) -> Iterator[Any]:
    from plugins.vllm.config import VLLMRolloutConfig
    from plugins.vllm.engine import VLLMRolloutEngine

    engine = VLLMRolloutEngine(model, VLLMRolloutConfig(cpu_cache_gb=0.1, check_every=1))
    yield engine
    engine.close()


@pytest.fixture
def sync(trainer: TrainEngine, tmp_path: Path, engine: Any) -> Callable[[], None]:
    """Return a function that changes every parameter of the trainer, sends them, and has the engine checked."""
    publisher = WeightPublisher(tmp_path / "weights")

    def sync() -> None:
        version = engine.weight_version + 1
        change(trainer.model, version)
        engine.receive(publisher.publish(version, trainer.gathered_parameters()))
        assert engine.metrics()["check_due"] == 1
        engine.check(EngineProbe(trainer).measure())

    return sync


def swap_experts(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    weight = new["model.layers.1.mlp.experts.routed_experts.w13_weight"]
    weight.copy_(weight[[1, 0, *range(2, len(weight))]].clone())


def keep_bias(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    new["model.layers.0.self_attn.qkv_proj.bias"].copy_(old["model.layers.0.self_attn.qkv_proj.bias"])


def keep_norm(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    new["model.layers.1.post_attention_layernorm.weight"].copy_(old["model.layers.1.post_attention_layernorm.weight"])


def keep_final_norm(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    new["model.norm.weight"].copy_(old["model.norm.weight"])


@pytest.mark.full
@pytest.mark.vllm
def test_planted_faults_are_found_at_the_sync_and_the_group_of_layers_is_named(
    engine: Any, sync: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync()
    (worker_model,) = engine._llm.collective_rpc(lambda worker: worker.model_runner.model)
    load = engine._load
    for fault, group in (
        (swap_experts, "layer 1, feed-forward block or experts"),
        (keep_bias, "layer 0, attention"),
        (keep_norm, "layer 1, feed-forward block or experts"),
        (keep_final_norm, "final norm"),
    ):

        def faulty_load(handle: WeightHandle, with_digests: bool, fault: Any = fault) -> dict[str, str]:
            old = {name: tensor.clone() for name, tensor in worker_model.named_parameters()}
            digests = load(handle, with_digests)
            fault(old, {name: tensor.data for name, tensor in worker_model.named_parameters()})
            return digests

        monkeypatch.setattr(engine, "_load", faulty_load)
        with pytest.raises(EngineMismatch, match=says("float32", group, "rollout.engine=hf")):
            sync()
        monkeypatch.setattr(engine, "_load", load)
        sync()

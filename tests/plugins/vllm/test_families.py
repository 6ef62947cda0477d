"""Every family of models that transformers and vLLM share computes the same in both after weight syncs.

The largest difference of a drawn token's log-probability is compared as loaded, after a change of every parameter, and
after a second one, which is a reload of a reload.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.weights.publisher import WeightPublisher
from plugins.vllm.config import VLLMRolloutConfig
from plugins.vllm.engine import VLLMRolloutEngine
from plugins.vllm_weights.families import LAYOUTS, PAST_LOADER, WRONG, WRONG_ON_CPU, sync_fault
from recipes.grpo.main import main
from tests.components.helpers.vllm_models import prompts_of
from tests.messages import says
from tests.plugins.vllm.families import DENSE, MIXTURES, VOCAB, change, weights_of, write_family

SAMPLE = ("mixtral", "gpt_oss", "qwen3_moe_padded")
"""Families of the full tier: one of each layout."""
REFUSED = sorted({*PAST_LOADER, *WRONG, *WRONG_ON_CPU})


def largest_gap(engine: VLLMRolloutEngine, model: torch.nn.Module, seed: int) -> float:
    """Draw responses, and compare their log-probabilities with the trainer's."""
    rows = [[3 + (5 * i + 3 * t * t) % (VOCAB - 3) for t in range(1 + i % 7)] for i in range(24)]
    drawn = engine.generate(prompts_of(rows), SamplingConfig(max_new_tokens=12, seed=seed))
    with torch.no_grad():
        logprob_N = token_logprobs(model, Batch(drawn.lengths, {"tokens": drawn["tokens"]})).logprob_N
    return float((logprob_N - drawn["rollout_logprob"])[drawn["action_mask"]].abs().max())


def check_family(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare an engine with the trainer through two weight syncs."""
    # The correction bias is 0 here, which vLLM rightly ignores.
    monkeypatch.delitem(WRONG_ON_CPU, "ernie4_5_moe")
    path = write_family(family, folder / "model")
    # Loaded first, because vLLM changes classes of transformers in its process.
    model = load_policy(path).eval()
    engine = VLLMRolloutEngine(path, VLLMRolloutConfig(cpu_cache_gb=0.1))
    try:
        gaps = [largest_gap(engine, model, seed=0)]
        publisher = WeightPublisher(folder / "weights")
        for version in (1, 2):
            change(model, seed=version)
            engine.receive(publisher.publish(version, weights_of(model), with_digests=True), verify=True)
            gaps.append(largest_gap(engine, model, seed=version))
    finally:
        engine.close()
    print(family, " ".join(f"{gap:.1e}" for gap in gaps))
    assert max(gaps) < 1e-4, gaps


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.parametrize("family", SAMPLE)
def test_engine_and_trainer_agree_after_weight_syncs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_family(family, tmp_path, monkeypatch)


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.parametrize("family", sorted({*MIXTURES, *DENSE} - {*SAMPLE}))
def test_engine_and_trainer_agree_after_weight_syncs_in_every_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_family(family, tmp_path, monkeypatch)


def test_every_mixture_with_a_layout_is_tested_and_accepted() -> None:
    assert {family.removesuffix("_padded") for family in MIXTURES} == set(LAYOUTS)
    assert not set(LAYOUTS) & {*PAST_LOADER, *WRONG}


@pytest.mark.full
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_fails_is_refused_by_name_before_the_run_starts(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    code = main(["--dry_run", f"model.path={tmp_path}", "data.path=task:sort", "rollout.engine=vllm"])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1), error
    assert re.search(says("vllm", family, "hf"), error)


def test_mixtures_that_were_not_tested_are_refused_and_dense_families_are_not() -> None:
    assert "not for dbrx2" in sync_fault({"model_type": "dbrx2", "num_experts": 8}, on_gpu=True)
    assert "not for jamba" in sync_fault({"model_type": "jamba", "num_local_experts": 8}, on_gpu=False)
    for config in ({}, {"model_type": "llama"}, {"model_type": "jamba", "num_experts": 1}, {"model_type": "gpt_oss"}):
        assert sync_fault(config, on_gpu=False) == ""
    assert sync_fault({"model_type": "cohere"}, on_gpu=True) == ""
    assert "correction bias" in sync_fault({"model_type": "ernie4_5_moe"}, on_gpu=False)
    assert sync_fault({"model_type": "ernie4_5_moe"}, on_gpu=True) == ""

"""Memory of replayed routes in the plan."""

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.models.size import size_of
from plugins.plan.memory import MemoryEstimate
from plugins.routing_replay.plan import bytes_per_token, with_routes
from recipes.grpo.config import GRPOConfig
from training.options.data_options import DataOptions
from training.options.model_options import ModelOptions

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/plan_table.py"))["MODELS"]


def test_a_route_takes_a_byte_per_routed_layer_and_expert(models: dict[str, Any]) -> None:
    mixture, dense = (size_of(models[name]) for name in ("Qwen3-30B-A3B", "Qwen2.5-7B"))
    assert mixture is not None
    assert dense is not None
    # 48 layers with 8 of 128 experts per token.
    assert bytes_per_token(mixture) == 384
    assert bytes_per_token(replace(mixture, experts=256)) == 768
    assert bytes_per_token(dense) == 0


def test_routes_of_a_step_are_host_memory_of_each_rank_of_the_policy(models: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(models["Qwen3-30B-A3B"]))
    config = GRPOConfig(
        model=ModelOptions(path=str(tmp_path)),
        data=DataOptions(path="task:sort"),
        prompts_per_step=64,
        samples_per_prompt=8,
    )
    estimate = MemoryEstimate(host=1000)
    assert with_routes(estimate, str(tmp_path), config, 4096) == estimate
    config = replace(config, rollout=replace(config.rollout, routing_replay="policy"))
    assert with_routes(estimate, str(tmp_path), config, 4096).host == 1000 + 512 * 4096 * 384
    assert with_routes(estimate, "no model", config, 4096) == estimate

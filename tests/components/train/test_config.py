"""Autocast on both engines, and plug-ins that options need."""

from pathlib import Path
from typing import Any

import pytest
import torch

from components import registry
from components.train.config import TrainConfig
from tests.components.helpers import option_cases as options
from tests.components.helpers.option_runs import Runs
from tests.messages import says


@pytest.fixture(scope="module")
def runs(tied_model: Path, other_tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("options"), tied_model, other_tied_model)


@pytest.mark.parametrize("case", options.CAST)
def test_autocast_affects_only_passes(runs: Runs, case: str) -> None:
    record, exact = (runs.cast()[f"{precision}-{case}"] for precision in PRECISIONS)
    difference_N = (record["before"] - exact["before"]).abs()
    print(f"log-probabilities off by at most {difference_N.max():.4f}, {difference_N.mean():.4f} on average")
    assert 1e-4 < difference_N.mean() < 0.02
    assert difference_N.max() < 0.1
    assert {tensor.dtype for part in ("weights", "masters") for tensor in record[part].values()} == {torch.float32}
    assert record["moments"] == {"torch.float32"}
    for actual, expected in zip(record["metrics"], exact["metrics"], strict=True):
        assert actual["loss"] != expected["loss"]
        assert actual["loss"] == pytest.approx(expected["loss"], rel=0.03)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    for name, expected in exact["weights"].items():
        torch.testing.assert_close(record["weights"][name], expected, atol=0.01, rtol=0)


PRECISIONS = ("bf16_autocast", "fp32")


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"context": 2}, ["parallel.context=2", "plug-in", "context"]),
        ({"tensor": 2}, ["parallel.tensor=2", "plug-in", "tensor"]),
        ({"expert": 2}, ["parallel.expert=2", "plug-in", "expert"]),
        ({"ema_beta": 0.9}, ["ema_beta=0.9", "plug-in", "ema"]),
        ({"lora_rank": 2}, ["lora_rank=2", "plug-in", "lora"]),
        ({"lora_path": "here"}, ["lora_path=here", "plug-in", "lora"]),
        ({"router_aux_loss_coef": 0.1}, ["router_aux_loss_coef=0.1", "plug-in", "router"]),
    ],
)
def test_an_option_whose_plug_in_is_missing_is_refused_by_its_name(
    settings: dict[str, Any], facts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {key: value for key, value in registry._provided().items() if key[0] == "train engine"}
    monkeypatch.setattr(registry, "_provided", lambda: engines)
    with pytest.raises(ValueError, match=says(*facts)):
        TrainConfig(**({"engine": "fsdp", "zero_stage": 2} | settings))

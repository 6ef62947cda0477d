"""Legend: N all tokens of a batch end to end, T tokens of a sequence, H dimensions of a state."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from components.batch import Batch
from components.models.state_values import token_values
from components.models.value_model import load_value_model
from tests.messages import says

# Lengths 5, 1, 8, 2: padding on three rows, and a sequence without a predicted token.
ROWS = [[2, 5, 9, 0, 1], [7], [2, 3, 4, 5, 6, 7, 8, 1], [11, 0]]


@pytest.fixture
def batch() -> Batch:
    return Batch.from_rows({"tokens": ROWS})


def test_the_value_of_a_token_is_that_of_the_state_before_it(tied_model: Path, batch: Batch) -> None:
    model = load_value_model(tied_model)
    value_N = token_values(model, batch)
    for i, row in enumerate(ROWS):
        hidden_TH = model.backbone(input_ids=torch.tensor([row])).last_hidden_state[0]
        after_T = (hidden_TH @ model.score.weight[0]).tolist()
        assert value_N[batch.sequence_ids == i].tolist() == pytest.approx([0.0, *after_T[:-1]], abs=1e-5)


def test_first_values_are_small_and_equal_for_equal_seeds(tied_model: Path, batch: Batch) -> None:
    value_N = token_values(load_value_model(tied_model, seed=5), batch)
    assert 0 < value_N.abs().max() < 1
    assert torch.equal(value_N, token_values(load_value_model(tied_model, seed=5), batch))
    assert not torch.equal(value_N, token_values(load_value_model(tied_model, seed=6), batch))


def test_a_saved_value_model_is_restored_and_loads_as_a_classifier(
    untied_model: Path, batch: Batch, tmp_path: Path
) -> None:
    model = load_value_model(untied_model, seed=5)
    with torch.no_grad():
        model.score.weight.mul_(3)
    model.save_pretrained(tmp_path)
    assert torch.equal(token_values(load_value_model(tmp_path), batch), token_values(model, batch))
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(classifier.score.weight, model.score.weight)


def test_a_classifier_with_several_classes_is_refused_as_a_value_model(untied_model: Path, tmp_path: Path) -> None:
    model = load_value_model(untied_model)
    model.score.weight = torch.nn.Parameter(torch.zeros(2, 64))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says("score.weight", [2, 64], [1, 64])):
        load_value_model(tmp_path)


def write_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_head_of_another_name_is_found_under_its_name_only(untied_model: Path, batch: Batch, tmp_path: Path) -> None:
    model = load_value_model(untied_model, seed=5, value_head_prefix="value_head")
    model.save_pretrained(tmp_path)
    again = load_value_model(tmp_path, seed=6, value_head_prefix="value_head")
    assert torch.equal(token_values(again, batch), token_values(model, batch))
    assert "value_head.weight" in load_file(tmp_path / "model.safetensors")
    assert not torch.equal(load_value_model(tmp_path, seed=6).score.weight, model.score.weight)
    # transformers would create a random head for it, so the config does not name a classifier.
    assert json.loads((tmp_path / "config.json").read_text()).get("architectures") is None


def test_normalised_values_are_scores_minus_mean_divided_by_deviation(
    untied_model: Path, batch: Batch, tmp_path: Path
) -> None:
    load_value_model(untied_model, seed=5).save_pretrained(tmp_path / "reward")
    write_config(tmp_path / "reward", mean=0.25, std=2)
    plain_N = token_values(load_value_model(tmp_path / "reward"), batch)
    model = load_value_model(tmp_path / "reward", normalize=True)
    normal_N = token_values(model, batch)
    torch.testing.assert_close(normal_N[1:5], (plain_N[1:5] - 0.25) / 2)
    assert normal_N[0].item() == 0.0
    model.save_pretrained(tmp_path / "critic")
    assert torch.equal(token_values(load_value_model(tmp_path / "critic", normalize=True), batch), normal_N)
    assert torch.equal(token_values(load_value_model(tmp_path / "critic"), batch), plain_N)


def test_a_critic_without_normalisation_drops_the_statistics_of_its_initial_model(
    untied_model: Path, tmp_path: Path
) -> None:
    load_value_model(untied_model).save_pretrained(tmp_path / "reward")
    write_config(tmp_path / "reward", mean=0.25, std=2.0)
    load_value_model(tmp_path / "reward").save_pretrained(tmp_path / "critic")
    with pytest.raises(ValueError, match=says(tmp_path / "critic", "mean=None", "std=None")):
        load_value_model(tmp_path / "critic", normalize=True)


@pytest.mark.parametrize(
    "statistics",
    [
        {"mean": 1.0, "std": None},
        {"mean": "high", "std": 1.0},
        {"mean": 0.0, "std": 0.0},
        {"mean": 0.0, "std": -1.0},
        {"mean": float("nan"), "std": 1.0},
    ],
)
def test_statistics_without_normalisation_are_refused(
    untied_model: Path, tmp_path: Path, statistics: dict[str, Any]
) -> None:
    load_value_model(untied_model).save_pretrained(tmp_path)
    write_config(tmp_path, **{name: value for name, value in statistics.items() if value is not None})
    with pytest.raises(
        ValueError, match=says("config.json", *(f"{name}={value}" for name, value in statistics.items()))
    ):
        load_value_model(tmp_path, normalize=True)


def test_a_head_with_a_bias_is_refused(untied_model: Path, tmp_path: Path) -> None:
    load_value_model(untied_model).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"score.bias": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=says(tmp_path, "score.bias")):
        load_value_model(tmp_path)


def test_an_incomplete_backbone_is_refused(untied_model: Path, tmp_path: Path) -> None:
    load_value_model(untied_model).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=says(tmp_path, "Qwen2Model", "norm.weight")):
        load_value_model(tmp_path)

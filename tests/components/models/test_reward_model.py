"""Scores of whole sequences, compared with the classifiers of transformers. Legend: B sequences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from components.batch import Batch
from components.models.reward_model import RewardModel
from components.models.value_model import load_value_model
from components.train.config import FrozenConfig, PassLimits
from tests.messages import says

PAD = 3
# Rows with the padding token in the middle, at the end, everywhere, and nowhere.
ROWS = [[5, 6, 7], [5, PAD, PAD, 8, 9, 2], [11, 4, PAD], [PAD], [PAD, PAD], [1, 2, 4, 5, 6, 7, 8, 9, 10, 11]]
BOS_EOS: dict[str, Any] = {"vocab_size": 20, "num_labels": 1, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
GATED: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**BOS_EOS, **GATED)),
    "qwen2": lambda: transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**BOS_EOS, **GATED)),
    # A model whose backbone has another name and learned positions.
    "gpt2": lambda: transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(**BOS_EOS, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
    ),
    # A model whose states are smaller than its layers.
    "opt": lambda: transformers.OPTForSequenceClassification(
        transformers.OPTConfig(
            **BOS_EOS,
            hidden_size=32,
            word_embed_proj_dim=16,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            do_layer_norm_before=False,
            init_std=0.2,
        )
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One classifier of each architecture, in several files as large models are."""
    root = tmp_path_factory.mktemp("reward_models")
    for name, make in CLASSIFIERS.items():
        torch.manual_seed(7)
        make().save_pretrained(root / name, max_shard_size="20KB")
        assert len(list((root / name).glob("*.safetensors"))) > 1
    return {name: root / name for name in CLASSIFIERS}


def alone(folder: Path) -> list[float]:
    """Return the score of each single row in transformers, so that no padding is needed."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits.item() for row in ROWS]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_equal_those_of_transformers_for_each_sequence_alone(folders: dict[str, Path], name: str) -> None:
    expected = alone(folders[name])
    assert max(expected) - min(expected) > 0.1
    model = RewardModel(folders[name])
    score_B = model.score(Batch.from_rows({"tokens": ROWS}))
    assert score_B.dtype == torch.float32
    assert score_B.device.type == "cpu"
    assert not score_B.requires_grad
    assert score_B.tolist() == pytest.approx(expected, abs=1e-5)
    for row, score in zip(ROWS, expected, strict=True):
        assert model.score(Batch.from_rows({"tokens": [row]})).item() == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("limits", [{"max_tokens": 1}, {"max_tokens": 12}, {"max_sequences": 2}])
def test_neither_order_nor_micro_batches_change_a_score(folders: dict[str, Path], limits: dict[str, Any]) -> None:
    expected = alone(folders["llama"])
    batch = Batch.from_rows({"tokens": ROWS}).with_objects(label=list(range(len(ROWS))))
    model = RewardModel(folders["llama"], FrozenConfig(limits=PassLimits(**limits)))
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 3, 4]):
        assert model.score(batch.select(order)).tolist() == pytest.approx([expected[i] for i in order], abs=1e-5)


def test_normalised_scores_have_the_mean_subtracted_and_are_divided_by_the_deviation(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    classifier = AutoModelForSequenceClassification.from_pretrained(folders["qwen2"])
    classifier.config.mean, classifier.config.std = 0.5, 4.0
    classifier.save_pretrained(tmp_path)
    expected = [(score - 0.5) / 4.0 for score in alone(tmp_path)]
    batch = Batch.from_rows({"tokens": ROWS})
    assert RewardModel(tmp_path, normalize=True).score(batch).tolist() == pytest.approx(expected, abs=1e-5)
    assert RewardModel(tmp_path).score(batch).tolist() == pytest.approx(alone(tmp_path), abs=1e-5)
    with pytest.raises(ValueError, match=says(folders["qwen2"], "mean=None", "std=None")):
        RewardModel(folders["qwen2"], normalize=True)


def test_a_value_model_with_another_head_name_gives_scores(untied_model: Path, tmp_path: Path) -> None:
    value = load_value_model(untied_model, seed=5, value_head_prefix="v_head").eval()
    value.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = [value(input_ids=torch.tensor([row]), use_cache=False)[0, -1].item() for row in ROWS]
    model = RewardModel(tmp_path, value_head_prefix="v_head")
    assert model.score(Batch.from_rows({"tokens": ROWS})).tolist() == pytest.approx(expected, abs=1e-5)


def test_bfloat16_gives_float32_scores_near_those_of_float32(folders: dict[str, Path]) -> None:
    score_B = RewardModel(folders["qwen2"], FrozenConfig(precision="bf16")).score(Batch.from_rows({"tokens": ROWS}))
    assert score_B.dtype == torch.float32
    assert score_B.tolist() == pytest.approx(alone(folders["qwen2"]), abs=0.1, rel=0.05)


def test_a_folder_without_the_head_is_refused(untied_model: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=says(untied_model, "score.weight", "value_head_prefix")):
        RewardModel(untied_model)
    with pytest.raises(ValueError, match=says(folders["llama"], "value_head.weight")):
        RewardModel(folders["llama"], value_head_prefix="value_head")


def test_several_labels_are_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = BOS_EOS | GATED | {"num_labels": 3}
    config = transformers.LlamaConfig(**settings)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says("score.weight", tmp_path, [3, 32], [1, 32], "num_labels=1")):
        RewardModel(tmp_path)


def test_no_sequences_have_no_scores_and_an_empty_one_is_refused(folders: dict[str, Path]) -> None:
    model = RewardModel(folders["llama"])
    batch = Batch.from_rows({"tokens": [[1, 2], [], [3]]})
    assert model.score(batch.select([])).tolist() == []
    with pytest.raises(ValueError, match="sequence 1 of 3 "):
        model.score(batch)

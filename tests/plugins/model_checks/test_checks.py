"""Checks of a model's vocabulary and positions."""

from pathlib import Path

import pytest

from plugins.demo.tiny_model import character_tokenizer
from plugins.model_checks.checks import check_positions, check_vocabulary
from tests.components.conftest import VOCAB, write_model
from tests.messages import says
from training.options.model_options import ModelOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    folder = tmp_path_factory.mktemp("checks") / "model"
    return ModelOptions(path=str(write_model(folder, seed=1, tied=True, positions=64)))


def letters(count: int) -> str:
    """Return different characters for a tokenizer of `count` tokens, three of which are special."""
    return "".join(chr(ord("A") + i) for i in range(count - 3))


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(model: ModelOptions) -> None:
    check_vocabulary(character_tokenizer(letters(VOCAB)), model)
    with pytest.raises(ValueError, match=says(VOCAB + 1, f"model.path={model.path}", VOCAB, "model.tokenizer_path")):
        check_vocabulary(character_tokenizer(letters(VOCAB + 1)), model)


def test_prompts_and_responses_beyond_the_positions_are_refused(model: ModelOptions) -> None:
    check_positions(model, 40, 24)
    with pytest.raises(ValueError, match=says("64 positions", "41 tokens", "rollout.max_new_tokens=24")):
        check_positions(model, 41, 24)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says("config.json")):
        check_positions(ModelOptions(path=str(tmp_path)), 1, 1)

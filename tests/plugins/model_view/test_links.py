"""A model with another tokenizer or other settings: engines load it from a folder of links."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from components.models.response_ends import end_tokens_of
from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer, tiny_model
from plugins.model_view.links import model_view
from tests.messages import says
from training.options.model_options import ModelOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = task_tokenizer(get_task("sort"))
    tiny_model(tokenizer, 1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_an_unchanged_model_is_used_in_place(model: Path, tmp_path: Path) -> None:
    assert model_view(str(model), tmp_path / "view", {}) == str(model)
    assert not (tmp_path / "view").exists()


def test_a_derived_model_folder_has_new_settings_and_the_original_weights(model: Path, tmp_path: Path) -> None:
    options = ModelOptions(path=str(model), config_overrides={"max_position_embeddings": 4096})
    before = json.loads((model / "config.json").read_text())
    options.prepared(tmp_path)
    prepared = options.prepared(tmp_path)  # as in a resumed run
    config = AutoConfig.from_pretrained(prepared.path)
    assert config.max_position_embeddings == 4096
    assert config.hidden_size == before["hidden_size"]
    assert json.loads((model / "config.json").read_text()) == before
    prepared_state, other = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, prepared.path))
    assert all(bool((prepared_state[name] == other[name]).all()) for name in prepared_state)


def test_a_tokenizer_of_another_folder_is_loaded(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = ModelOptions(path=str(model), tokenizer_path=f"{tmp_path}/tokenizer")
    prepared = options.prepared(tmp_path)
    for loaded in (options.tokenizer(), prepared.tokenizer(), AutoTokenizer.from_pretrained(prepared.path)):
        assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_a_user_chat_template_is_stored_in_the_model_folder_of_engines(model: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}<pad>{% endfor %}"
    prepared = ModelOptions(path=str(model), chat_template=template).prepared(tmp_path)
    assert AutoTokenizer.from_pretrained(prepared.path).chat_template == template
    assert AutoTokenizer.from_pretrained(model).chat_template != template
    assert end_tokens_of(prepared.path) == [0, 2]  # <pad> is also an end token here, in addition to the model's <eos>
    assert end_tokens_of(model) == [2]


def test_an_unknown_model_setting_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says("model.config_overrides", "max_positions", str(model))):
        model_view(str(model), tmp_path / "view", {"max_positions": 1})


@pytest.mark.parametrize(
    ("recipe", "options", "facts"),
    [
        ("grpo", ["model.config_overrides={max_positions: 1}"], ["model.config_overrides", "max_positions"]),
        ("sft", ["model.config_overrides={hidden_size: 8}"], ["model.path=new:sort", "model.config_overrides"]),
    ],
)
def test_invalid_model_settings_are_reported_in_one_line_before_the_start(
    recipe: str, options: list[str], facts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = import_module(f"recipes.{recipe}.main").main
    assert main([*options, f"run_dir={tmp_path}/run", "backend=local"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says(*facts), line)

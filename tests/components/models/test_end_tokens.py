"""A response ends with any end token that a model's files name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.models.disk.export import save_model
from components.models.loading import load_policy
from components.models.response_ends import end_tokens_of
from tests.chat_models import END_ID, TURN_END, chat_model

EOS_ID = 2


@pytest.mark.parametrize(
    ("generation", "eos", "expected"),
    [
        ({"eos_token_id": EOS_ID}, TURN_END, [EOS_ID, END_ID]),
        ({"eos_token_id": [EOS_ID, 7]}, TURN_END, [EOS_ID, 7, END_ID]),
        # config.json names <eos> only the template names another end of turn
        ({"eos_token_id": END_ID}, TURN_END, [EOS_ID, END_ID]),
        ({"eos_token_id": EOS_ID}, "<eos>", [EOS_ID, END_ID]),  # the template alone ends turns with another
        ({"do_sample": True}, "<eos>", [EOS_ID, END_ID]),
    ],
)
@pytest.mark.parametrize("empty", [False, True])
def test_end_tokens_are_the_union_of_tokenizer_template_config_and_generation_config(
    generation: dict[str, Any], eos: str, expected: list[int], empty: bool, tmp_path: Path
) -> None:
    folder = chat_model(tmp_path, eos=eos, **generation)
    assert end_tokens_of(folder) == expected
    model: Any = load_policy(folder, empty=empty)
    assert sorted(model.generation_config.eos_token_id) == expected
    assert END_ID in model.config.eos_token_id


def test_files_with_equal_end_tokens_are_not_changed(tmp_path: Path) -> None:
    folder = chat_model(tmp_path, template=None)
    model: Any = load_policy(folder)
    assert (model.generation_config.eos_token_id, model.config.eos_token_id) == (EOS_ID, EOS_ID)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert end_tokens_of(folder) == [EOS_ID]


def test_a_response_ends_with_the_tokenizers_end_token_and_an_export_names_it(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model", eos=TURN_END, eos_token_id=EOS_ID)
    engine = HFRolloutEngine(folder)
    with torch.no_grad():
        # All hidden states are equal, so the most likely token is equal too.
        engine.model.model.norm.weight.zero_()
        engine.model.lm_head = torch.nn.Linear(32, END_ID + 2)
        engine.model.lm_head.bias.zero_()[END_ID] = 9.0
    prompts = Batch.from_rows({"tokens": [[5, 6]]}, {"prompt_id": [0], "sample_id": [0]})
    drawn = engine.generate(prompts, SamplingConfig(max_new_tokens=4, temperature=0))
    assert drawn["tokens"].tolist() == [5, 6, END_ID]
    assert drawn["truncated"].tolist() == [False]
    policy = load_policy(folder)
    tensors = dict(policy.named_parameters())
    save_model(tmp_path / "export", policy, tensors, tensors.items())
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "export" / file).read_text())["eos_token_id"] == [EOS_ID, END_ID]


def test_an_end_token_beyond_the_vocabulary_is_not_passed_to_engines(tmp_path: Path) -> None:
    folder = chat_model(tmp_path, eos=TURN_END, eos_token_id=[EOS_ID, 9_999])
    assert end_tokens_of(folder) == [EOS_ID, END_ID]

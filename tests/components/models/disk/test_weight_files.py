"""A model that is created empty and read by shards equals a fully loaded one."""

import filecmp
import gc
import json
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from components.models.disk.export import save_model
from components.models.disk.weight_files import fill
from components.models.loading import load_policy
from components.models.value_model import load_value_model
from tests.components.helpers import empty_worker
from tests.components.helpers.empty_worker import CASES
from tests.components.helpers.ranks import NIGHTLY_ON_TWO, run_ranks
from tests.messages import says

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def experts() -> PreTrainedModel:
    sizes: dict[str, Any] = SIZES | {
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "experts": experts,
    "few experts": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "transposed": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2)
    ),
}
"""Models whose files use other names, one tensor per expert, or weights of shape [in, out]."""


@pytest.fixture(scope="module", params=NIGHTLY_ON_TWO)
def ranks(
    request: pytest.FixtureRequest, tied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[bool, Any]]]:
    return run_ranks(empty_worker.both_ways, request.param, tmp_path_factory.mktemp("empty"), str(tied_model))


@pytest.mark.parametrize("case", CASES)
def test_a_model_created_empty_trains_bit_equal_to_a_fully_loaded_one(
    ranks: list[dict[str, dict[bool, Any]]], case: str
) -> None:
    for record in ranks:
        whole, empty = record[case][False], record[case][True]
        for moment in ("first", "last"):
            assert list(empty[moment]) == list(whole[moment])
            assert all(torch.equal(empty[moment][name], whole[moment][name]) for name in whole[moment])
        assert empty["metrics"] == whole["metrics"]
        assert torch.equal(empty["random"], whole["random"])
        assert empty["bytes"] == whole["bytes"]


def test_a_rank_reads_only_its_shard_of_the_files(ranks: list[dict[str, dict[bool, Any]]]) -> None:
    for record in ranks:
        read, kept = record["read"][True]
        # A share of 75,584 float32 numbers, and the header, which has 26 names.
        assert kept == 4 * 75_584 // len(ranks)
        assert kept <= read < kept + 10_000


@pytest.mark.parametrize("kind", KINDS)
def test_read_and_exported_weights_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(3)
    KINDS[kind]().save_pretrained(tmp_path / "stored")
    whole = load_policy(tmp_path / "stored")
    empty = load_policy(tmp_path / "stored", empty=True)
    assert all(parameter.is_meta for parameter in empty.parameters())
    fill(empty, "cpu")
    expected = dict(whole.named_parameters())
    for name, parameter in empty.named_parameters():
        assert torch.equal(parameter, expected.pop(name)), name
    assert not expected
    tokens_BT = torch.tensor([[3, 7, 11, 5]])
    assert torch.equal(empty(tokens_BT).logits, whole(tokens_BT).logits)
    export(empty, tmp_path / "exported")
    whole.save_pretrained(tmp_path / "saved")
    files = sorted(file.name for file in (tmp_path / "saved").iterdir())
    assert sorted(file.name for file in (tmp_path / "exported").iterdir()) == files
    assert filecmp.cmpfiles(tmp_path / "exported", tmp_path / "saved", files, shallow=False)[0] == files


def export(model: PreTrainedModel, folder: Path, **options: Any) -> list[int]:
    """Export a model. Return the number of weights in memory each time the next one is requested."""
    shapes = {name: parameter.detach().to("meta") for name, parameter in model.named_parameters()}
    alive: list[weakref.ref[Tensor]] = []
    counts = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            gc.collect()
            counts.append(sum(ref() is not None for ref in alive))
            copy = parameter.detach().clone()
            alive.append(weakref.ref(copy))
            yield name, copy
            del copy

    save_model(folder, model, shapes, weights(), **options)
    return counts


def test_an_export_frees_written_tensors_and_splits_large_models_with_an_index(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = experts()
    model.save_pretrained(tmp_path / "stored")
    model = load_policy(tmp_path / "stored")
    # The loop variable still refers to the last written tensor.
    assert max(export(model, tmp_path / "exported", file_bytes=20_000)) == 1
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    again = load_policy(tmp_path / "exported", empty=True)
    fill(again, "cpu")
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_a_model_that_cannot_be_read_by_parts_is_loaded_whole_with_a_logged_reason(
    untied_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_policy(untied_model)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING):
        loaded = load_policy(tmp_path, empty=True)
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    assert re.search(says("whole", "no safetensors files", tmp_path), caplog.text)


def test_a_value_model_created_empty_gets_its_head_and_the_weights_of_its_folder(untied_model: Path) -> None:
    whole = load_value_model(untied_model, seed=5)
    empty = load_value_model(untied_model, seed=5, empty=True)
    assert torch.equal(empty.score.weight, whole.score.weight)
    fill(empty, "cpu")
    for name, parameter in empty.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name

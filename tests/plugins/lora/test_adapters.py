"""Adapters on both engines, in a plain process and in two ranks."""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from components.batch import Batch
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.models.state_values import token_values
from components.models.value_model import load_value_model
from components.train.config import TrainConfig, TrainOptions
from plugins.lora.adapters import LoraAdapters
from tests.components.helpers import option_cases as options
from tests.components.helpers import train_cases as cases
from tests.components.helpers.option_runs import Runs, same_bits
from tests.components.helpers.ranks import NIGHTLY_ON_TWO
from tests.messages import says

FLOAT32 = [case for case in options.LORA if "bf16" not in case]


@pytest.fixture(scope="module")
def runs(tied_model: Path, other_tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("options"), tied_model, other_tied_model)


class Plain(NamedTuple):
    losses: list[float]
    adapters: dict[str, Tensor]
    merged: dict[str, Tensor]


@pytest.fixture(scope="module")
def plain(runs: Runs, tied_model: Path) -> Plain:
    """Train with plain torch and peft, from the initial adapters of the engines."""
    config = LoraConfig(r=options.RANK, lora_alpha=int(options.ALPHA), target_modules="all-linear")
    model = get_peft_model(load_policy(tied_model), config)
    named = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    first = runs.lora(1)[0]["zero-0"]["first"]
    assert named.keys() == first.keys()
    for name, parameter in named.items():
        parameter.data.copy_(first[name])
    optimizer = torch.optim.AdamW(named.values(), betas=cases.BETAS, eps=cases.EPS, weight_decay=cases.WEIGHT_DECAY)
    losses = []
    # 4 steps in total, linear decay without warm-up
    for share, batch in zip((1.0, 0.75, 0.5), cases.minibatches(), strict=True):
        loss = -token_logprobs(model, batch).logprob_N[batch["loss_mask"]].mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(named.values(), cases.MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = cases.LEARNING_RATE * share
        optimizer.step()
        losses.append(loss.item())
    adapters = {name: parameter.detach().clone() for name, parameter in named.items()}
    return Plain(losses, adapters, {n: p.detach() for n, p in model.merge_and_unload().named_parameters()})


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", FLOAT32)
def test_adapters_train_as_with_plain_torch_and_peft(runs: Runs, plain: Plain, world_size: int, case: str) -> None:
    """Holds for each engine, ZeRO stage and number of ranks, with and without activation checkpointing."""
    record = runs.lora(world_size)[0][case]
    assert [metrics["loss"] for metrics in record["metrics"]] == pytest.approx(plain.losses, rel=2e-5)
    assert record["last"].keys() == plain.adapters.keys()
    for name, expected in plain.adapters.items():
        torch.testing.assert_close(record["last"][name], expected, atol=1e-5, rtol=0)
    assert record["weights"].keys() == plain.merged.keys()
    for name, expected in plain.merged.items():
        torch.testing.assert_close(record["weights"][name], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", options.LORA)
def test_only_adapters_change_and_initial_outputs_equal_the_model(
    runs: Runs, tied_model: Path, world_size: int, case: str
) -> None:
    record = runs.lora(world_size)[0][case]
    # 2 layers with 7 linear layers each, with an A and a B. B is initially 0.
    assert len(record["first"]) == 2 * 7 * 2
    assert all((".lora_A." in name) == bool(tensor.any()) for name, tensor in record["first"].items())
    assert all(not torch.equal(record["last"][name], tensor) for name, tensor in record["first"].items())
    assert same_bits(record["beneath"], record["still_beneath"])
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    model = {name: parameter.detach().to(dtype) for name, parameter in load_policy(tied_model).named_parameters()}
    assert same_bits(record["start"], model)
    for name, tensor in runs.lora(1)[0]["zero-0"]["first"].items():
        # DeepSpeed creates its master weights from rounded ones: 9 bits below 0.125.
        torch.testing.assert_close(record["first"][name], tensor, atol=3e-4 if case == "bf16-1" else 0.0, rtol=0)


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", options.LORA)
def test_the_export_is_the_merged_model_of_peft(runs: Runs, tied_model: Path, world_size: int, case: str) -> None:
    folder = runs.saved_models(world_size) / f"hf-{case}"
    record = runs.lora(world_size)[0][case]
    assert same_bits(load_file(folder / "model.safetensors"), record["weights"])
    peft: Any = PeftModel.from_pretrained(load_policy(tied_model), folder / "adapter")
    merged = dict(peft.merge_and_unload().named_parameters())
    # Rounded once here. peft rounds before and after the addition: 4 bits of bfloat16 below 1.
    tolerance = 0.01 if "bf16" in case else 1e-6
    for name, tensor in record["weights"].items():
        torch.testing.assert_close(tensor.float(), merged[name].detach(), atol=tolerance, rtol=0)
    batch = Batch.concat(cases.evaluated())
    with torch.no_grad():
        alone_N = token_logprobs(load_policy(folder), batch).logprob_N
    engine_N = torch.cat([rank[case]["after"] for rank in runs.lora(world_size)])
    torch.testing.assert_close(engine_N, alone_N, atol=0.1 if "bf16" in case else 1e-5, rtol=0)


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", options.LEARNED)
def test_adapters_learn(runs: Runs, world_size: int, case: str) -> None:
    losses = runs.lora(world_size)[0][f"learned-{case}"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_a_value_model_trains_adapters_and_its_whole_head(
    runs: Runs, tied_model: Path, world_size: int, name: str
) -> None:
    record = runs.lora(world_size)[0][f"value-{name}"]
    assert len(record["first"]) == 2 * 7 * 2 + 1
    assert not torch.equal(record["last"]["score.weight"], record["first"]["score.weight"])
    for key, expected in runs.lora(1)[0]["value-deepspeed"]["last"].items():
        torch.testing.assert_close(record["last"][key], expected, atol=1e-5, rtol=0)
    folder = runs.saved_models(world_size) / f"value-{name}"
    with torch.no_grad():
        value_N = token_values(load_value_model(folder, needs_head=True), Batch.concat(cases.evaluated()))
    engine_N = torch.cat([rank[f"value-{name}"]["after"] for rank in runs.lora(world_size)])
    torch.testing.assert_close(engine_N, value_N, atol=1e-5, rtol=0)
    backbone = PeftModel.from_pretrained(load_value_model(tied_model).backbone, folder / "adapter")
    loaded = {name: p for name, p in backbone.named_parameters() if ".lora_" in name}
    for key, tensor in record["last"].items():
        if ".lora_" in key:
            assert torch.equal(loaded[f"base_model.model.{key.removeprefix('backbone.')}"], tensor)


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", options.RESUMED)
def test_resumed_training_of_adapters_is_bit_equal(runs: Runs, world_size: int, case: str) -> None:
    for rank in runs.resumed(world_size):
        record = rank[case]
        assert record["inexact"] == []
        assert record["again"]["metrics"] == record["on"]["metrics"]
        assert same_bits(record["again"]["masters"], record["on"]["masters"])
        assert same_bits(record["again"]["average"], record["on"]["average"])
    saved = {}
    for file in (runs.states(world_size) / case).glob("rank_*.safetensors"):
        saved |= load_file(file)
    # The state has adapters with their two moments, and nothing of the frozen weights.
    assert len(saved) == 2 * 7 * 2 * 3
    assert all(".lora_" in name for name in saved)


@pytest.mark.full
@pytest.mark.parametrize(("saved", "loaded"), options.CROSSED)
def test_one_rank_of_another_engine_resumes_from_a_checkpoint_of_two(runs: Runs, saved: str, loaded: str) -> None:
    record = runs.crossed()[f"{saved}-{loaded}"]
    before = runs.resumed(2)[0][saved]
    assert same_bits(record["loaded"], before["saved"]["masters"])
    assert re.findall(r"\d+", record["inexact"][0]) == ["2", "1"]
    if "lora_dropout" not in options.RESUMED[saved] | options.RESUMED[loaded]:
        tolerance = 0.02 if "bf16" in saved else 1e-5
        assert record["metrics"][0]["loss"] == pytest.approx(before["on"]["metrics"][0]["loss"], rel=tolerance)


def test_a_state_of_other_adapters_or_of_another_model_is_refused(runs: Runs) -> None:
    messages = runs.refused()
    saved_settings = "lora_rank=4, lora_alpha=8.0, lora_target_modules=all-linear"
    assert re.search(f"(?=.*zero-0).*{saved_settings}.*lora_rank=0", messages["without"])
    assert re.search(f"(?=.*plain).*lora_rank=0.*{saved_settings}", messages["of_none"])
    assert re.search(f"(?=.*zero-0).*{saved_settings}.*lora_rank=3", messages["other_rank"])
    assert re.search(
        f"{saved_settings}.*lora_rank=4, lora_alpha=8.0, lora_target_modules=q_proj, v_proj", messages["other_targets"]
    )
    assert "zero-0" in messages["other_weights"]
    assert "lora_" not in messages["other_weights"]


@pytest.mark.parametrize("world_size", NIGHTLY_ON_TWO)
@pytest.mark.parametrize("case", [case for case, changes in options.RESUMED.items() if "ema_beta" in changes])
def test_the_moving_average_covers_the_adapters_and_its_export_is_merged(
    runs: Runs, tied_model: Path, world_size: int, case: str
) -> None:
    record = runs.resumed(world_size)[0][case]
    before = record["saved"]
    last = record["on"]
    for name, tensor in last["average"].items():
        # ema_beta = 0.5
        expected = (before["average"][name] + last["masters"][name]) / 2
        torch.testing.assert_close(tensor, expected, atol=1e-7, rtol=0)
    folder = runs.saved_models(world_size) / f"hf-ema-{case}"
    merged = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    down, up = (last["average"][f"{name}.lora_{side}.default.weight"] for side in "AB")
    weight = dict(load_policy(tied_model).named_parameters())[f"{name}.weight"]
    # 8 / 4 = 2
    torch.testing.assert_close(merged[f"{name}.weight"], weight + 2.0 * (up @ down), atol=1e-6, rtol=0)
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert torch.equal(adapter[f"base_model.model.{name}.lora_B.weight"], up)


def test_layers_with_transposed_weights_are_merged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    model = load_policy(tmp_path)
    adapters = LoraAdapters(model, TrainConfig(lora_rank=2))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    trained = {name: tensor for name, tensor in named.items() if ".lora_" in name}
    merged = load_policy(tmp_path)
    weights = dict(adapters.merged(((n, t) for n, t in named.items() if n not in trained), trained))
    assert weights.keys() == dict(merged.named_parameters()).keys()
    merged.load_state_dict(weights, strict=False)
    batch = cases.ragged(1, 3)
    found_N, expected_N = (token_logprobs(one.eval(), batch).logprob_N for one in (merged, model))
    torch.testing.assert_close(found_N, expected_N, atol=1e-5, rtol=0)


def test_a_seed_gives_the_same_adapters_and_leaves_the_global_random_state_unchanged(tied_model: Path) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    models = [load_policy(tied_model) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        LoraAdapters(model, TrainConfig(lora_rank=2, seed=seed))
    assert torch.equal(torch.get_rng_state(), state)
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    first, again, other = (dict(model.named_parameters())[name] for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("targets", "facts"),
    [
        ("q_proj, qproj", ["'qproj'", "down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "up_proj", "v_proj"]),
        ("embed_tokens", ["'embed_tokens'", "Qwen2ForCausalLM", "lm_head"]),
        ("q_proj,lm_head", ["lora_target_modules='q_proj,lm_head'"]),
    ],
)
def test_layers_without_support_for_adapters_raise_an_error_that_names_them(
    tied_model: Path, targets: str, facts: list[str]
) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        LoraAdapters(load_policy(tied_model), TrainConfig(lora_rank=2, lora_target_modules=targets))


def test_the_head_of_an_untied_model_may_have_an_adapter(untied_model: Path) -> None:
    model = load_policy(untied_model)
    adapters = LoraAdapters(model, TrainConfig(lora_rank=2, lora_target_modules="lm_head"))
    assert list(adapters.layers) == ["lm_head"]


def test_without_peft_the_options_raise_an_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=says("lora_rank=2", "peft", "scripts/setup.sh lora")):
        TrainOptions(lora_rank=2)

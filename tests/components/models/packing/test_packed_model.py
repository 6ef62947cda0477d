"""Legend: B sequences, N all their tokens end to end, T tokens of one sequence, S of one attention call, H heads, D
head size.
"""

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from components import registry
from components.batch import Batch
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.models.packing import packed_model as packing
from components.models.packing.layout import END_TO_END, layout_of, packs
from components.models.packing.packed_model import packed_inputs
from components.models.packing.packed_row import PackedRow
from components.models.state_values import state_values, token_values
from components.models.value_model import load_value_model
from tests.components.helpers import packing_cases
from tests.components.helpers.ranks import run_ranks
from tests.messages import says

# Lengths 11, 1, 8, 2: longer and shorter than the windows of 4 below, and one sequence without a predicted token.
ROWS = [[2, 5, 9, 0, 1, 7, 7, 3, 4, 5, 6], [7], [2, 3, 4, 5, 6, 7, 8, 1], [11, 0]]
SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOWED: dict[str, Any] = SMALL | {"head_dim": 8, "sliding_window": 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**WINDOWED),
    # Soft caps of attention and of logits, and windows in every other layer.
    "gemma2": lambda: transformers.Gemma2Config(
        **WINDOWED, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**WINDOWED, query_pre_attn_scalar=8),
    # Attention sinks, and experts.
    "gpt_oss": lambda: transformers.GptOssConfig(**WINDOWED, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "bloom": (lambda: transformers.BloomConfig(vocab_size=20, hidden_size=32, n_layer=2, n_head=4), ["Bloom"]),
    "llama4": (
        lambda: transformers.Llama4TextConfig(**SMALL, head_dim=8, num_local_experts=2, intermediate_size_mlp=64),
        ["Llama4", "chunked_attention"],
    ),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=20, hidden_size=32, num_hidden_layers=2),
        ["Mamba", "linear_attention"],
    ),
}


@pytest.fixture
def batch() -> Batch:
    return Batch.from_rows({"tokens": ROWS})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            config = CONFIGS[name]() if name in CONFIGS else REFUSED[name][0]()
            made[name] = tmp_path_factory.mktemp(name)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made[name])
        return made[name]

    return get


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def both(model: nn.Module, batch: Batch) -> Tensor:
    output = token_logprobs(model, batch, 0.8, with_entropy=True)
    assert output.entropy_N is not None
    return torch.stack([output.logprob_N, output.entropy_N])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_values_and_gradients_equal_those_of_separate_sequences(
    folder_of: Callable[[str], Path], batch: Batch, name: str, checkpointing: bool
) -> None:
    model = load_policy(folder_of(name), gradient_checkpointing=checkpointing, packing=True).train(checkpointing)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    # The model's original attention, which does not support packing.
    reference = load_policy(folder_of(name), attn_implementation="eager").eval()
    packed_2N = both(model, batch)
    alone_2N = torch.cat([both(reference, batch.select([i])) for i in range(len(batch))], 1)
    torch.testing.assert_close(packed_2N, alone_2N, rtol=0, atol=1e-5)
    actual, expected = gradients(model, packed_2N.sum()), gradients(reference, alone_2N.sum())
    assert actual.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], rtol=1e-5, atol=1e-5 * float(expected[key].abs().max()))


def test_another_sequence_changes_no_bit(folder_of: Callable[[str], Path], batch: Batch) -> None:
    model = load_policy(folder_of("llama"), packing=True)
    changed = copy.deepcopy(ROWS)
    changed[2] = [9, 9, 1, 1, 3, 0, 5, 8]
    logprob_N, other_N = both(model, batch), both(model, Batch.from_rows({"tokens": changed}))
    same_N = batch.sequence_ids != 2
    assert torch.equal(logprob_N[:, same_N], other_N[:, same_N])
    assert not torch.equal(logprob_N, other_N)


def test_values_equal_those_of_separate_sequences(tied_model: Path, batch: Batch) -> None:
    packed = load_value_model(tied_model, packing=True).eval()
    plain = load_value_model(tied_model).eval()
    assert packs(packed)
    assert not packs(plain)
    for compute in (token_values, state_values):
        alone_N = torch.cat([compute(plain, batch.select([i])) for i in range(len(batch))])
        torch.testing.assert_close(compute(packed, batch), alone_N, rtol=0, atol=1e-5)


def test_sequences_of_one_token_are_still_part_of_a_graph(tied_model: Path) -> None:
    model = load_policy(tied_model, packing=True)
    output_N = token_logprobs(model, Batch.from_rows({"tokens": [[2], [5]]})).logprob_N
    assert output_N.tolist() == [0.0, 0.0]
    assert all(not bool(gradient.any()) for gradient in gradients(model, output_N.sum()).values())


def test_attention_is_computed_within_each_sequence_and_without_padding(tied_model: Path, batch: Batch) -> None:
    model, sizes = load_policy(tied_model, packing=True), []
    model.get_input_embeddings().register_forward_hook(lambda *call: sizes.append(list(call[1][0].shape)))
    both(model, batch)
    # 11 + 1 + 8 + 2 tokens, without the last token of each sequence.
    assert sizes == [[1, 18]]


def test_the_soft_cap_of_attention_is_applied(folder_of: Callable[[str], Path], batch: Batch) -> None:
    # transformers' sdpa silently does this.
    choices: list[dict[str, Any]] = [
        {"attn_implementation": "eager"},
        {},
        {"attn_implementation": "sdpa", "packing": True},
    ]
    eager_2N, default_2N, packed_2N = (both(load_policy(folder_of("gemma2"), **choice), batch) for choice in choices)
    assert torch.equal(default_2N, eager_2N)
    torch.testing.assert_close(packed_2N, eager_2N, rtol=0, atol=1e-5)
    for load in (load_policy, load_value_model):
        with pytest.raises(ValueError, match=says("Gemma2", "sdpa", "eager")):
            load(folder_of("gemma2"), attn_implementation="sdpa")


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_packed_are_rejected(folder_of: Callable[[str], Path], name: str) -> None:
    with pytest.raises(ValueError, match=says(*REFUSED[name][1], "packing=False")):
        load_policy(folder_of(name), packing=True)


def test_a_model_that_ignores_sequence_boundaries_is_refused(tied_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(batch: Batch) -> tuple[dict[str, Any], None]:
        return {name: x for name, x in packed_inputs(batch)[0].items() if name != "packed_row"}, None

    monkeypatch.setattr(packing, "packed_inputs", without)
    with pytest.raises(ValueError, match=r"(?=.*packing=False).* \d"):
        load_policy(tied_model, packing=True)


def test_unpacked_calls_of_a_model_with_packing_are_unchanged(folder_of: Callable[[str], Path]) -> None:
    tokens_BS = torch.tensor([[0, 0, 2, 5, 9, 4, 3], [2, 6, 4, 4, 9, 8, 1]])
    mask_BS = (tokens_BS != 0).long()
    models: list[Any] = [load_policy(folder_of("mistral"), packing=packing) for packing in (True, False)]
    with torch.no_grad():
        for arguments in ({"attention_mask": mask_BS}, {}, {"use_cache": True}):
            actual, expected = (model(input_ids=tokens_BS, **arguments).logits for model in models)
            torch.testing.assert_close(actual[:, 2:], expected[:, 2:], rtol=0, atol=1e-5)
    written = [
        model.generate(tokens_BS, attention_mask=mask_BS, max_new_tokens=6, do_sample=False).tolist()
        for model in models
    ]
    assert written[0] == written[1]


def test_attention_dropout_has_its_configured_rate(tied_model: Path) -> None:
    # One query sees one key. With probability 0.75 its value is kept, multiplied by 1 / 0.75.
    torch.manual_seed(0)
    model = load_policy(tied_model, packing=True)
    attention: Any = next(module for module in model.modules() if hasattr(module, "attention_dropout"))
    ones_1HSD = torch.ones(1, 8, 500, 2)
    row = PackedRow(Batch([1] * 500, {"tokens": torch.zeros(500, dtype=torch.int64)}))
    for softcap in (None, 5.0):
        output, _ = packing._attention(
            attention, ones_1HSD, ones_1HSD, ones_1HSD, None, dropout=0.25, softcap=softcap, packed_row=row
        )
        assert sorted({round(x, 4) for x in output.unique().tolist()}) == [0.0, 1.3333]
        assert float((output != 0).float().mean()) == pytest.approx(0.75, abs=0.02)


def test_soft_cap_window_and_sinks_equal_a_calculation_by_hand() -> None:
    # Scores of the third token with a window of 2: 4 and 6, capped to 5 tanh(4/5) and 5 tanh(6/5). The attention sink
    # has 1.
    query_11SD = torch.tensor([[[[0.0], [0.0], [2.0]]]])
    key_11SD = torch.tensor([[[[9.0], [2.0], [3.0]]]])
    value_11SD = torch.tensor([[[[7.0], [1.0], [10.0]]]])
    capped = [5 * math.tanh(x / 5) for x in (4.0, 6.0)]
    total = sum(math.exp(x) for x in (*capped, 1.0))
    output, _ = packing._attention(
        nn.Identity(),
        query_11SD,
        key_11SD,
        value_11SD,
        torch.full((1, 1, 1, 1), 2),
        scaling=1.0,
        softcap=5.0,
        s_aux=torch.tensor([1.0]),
        packed_row=PackedRow(Batch.from_rows({"tokens": [[4, 4, 4]]})),
    )
    assert output[0, 2].item() == pytest.approx((math.exp(capped[0]) * 1 + math.exp(capped[1]) * 10) / total)


def test_micro_batches_are_limited_by_computed_places(batch: Batch) -> None:
    # Sorted lengths: 1, 2, 8, 11. Padded, 8 and two shorter sequences are 24 places. Packed they are 11, and all are
    # 22.
    assert [index.tolist() for index in batch.micro_batch_indices(11)] == [[1, 3], [2], [0]]
    assert [index.tolist() for index in batch.micro_batch_indices(11, packing=True)] == [[1, 3, 2], [0]]
    assert [index.tolist() for index in batch.micro_batch_indices(22, packing=True)] == [[1, 3, 2, 0]]
    assert [index.tolist() for index in batch.micro_batch_indices(21, packing=True)] == [[1, 3, 2], [0]]
    assert [index.tolist() for index in batch.micro_batch_indices(3, packing=True)] == [[1, 3], [2], [0]]
    assert [index.tolist() for index in batch.micro_batch_indices(22, 3, packing=True)] == [[1, 3, 2], [0]]


def test_a_model_without_packing_is_padded_unless_packing_is_requested(
    folder_of: Callable[[str], Path], batch: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    assert packs(load_policy(folder_of("llama"), packing=None))
    assert not caplog.messages
    plain, padded = load_policy(folder_of("bloom")), load_policy(folder_of("bloom"), packing=None)
    assert not packs(padded)
    assert re.search(says("Bloom", "padded"), " ".join(caplog.messages))
    assert torch.equal(both(padded, batch), both(plain, batch))


def test_without_a_plug_in_for_shared_tokens_each_sequence_is_computed_whole(
    tied_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch.from_rows({"tokens": [[2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 8]]})
    shared = both(load_policy(tied_model, packing=True), batch)
    monkeypatch.setattr(registry, "_provided", dict)
    packing._warn_once.cache_clear()
    models = [load_policy(tied_model, packing=True) for _ in range(2)]
    assert all(layout_of(model) is END_TO_END for model in models)
    torch.testing.assert_close(both(models[0], batch), shared, rtol=0, atol=1e-5)
    assert [message for message in caplog.messages if "shared prompts" in message] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.fixture(scope="module")
def record(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of rank 0 of two ranks."""
    return run_ranks(packing_cases.packed, 2, tmp_path_factory.mktemp("packing"), str(tied_model))[0]


@pytest.mark.full
@pytest.mark.parametrize("case", [*packing_cases.CASES, *(f"value-{case}" for case in packing_cases.VALUES)])
def test_every_engine_trains_equally_with_packing_chunks_and_padding(record: dict[str, Any], case: str) -> None:
    precision = packing_cases.CASES.get(case, {}).get("precision", "fp32")
    kind = "value" if case.startswith("value") else precision
    actual, expected = record[case], record[f"{packing_cases.PLAIN}-{kind}"]
    # In bfloat16 within one rounding step, because the order of sums differs.
    atol = 1e-5 if precision == "fp32" else 0.05
    torch.testing.assert_close(actual["before"], expected["before"], rtol=0, atol=atol)
    torch.testing.assert_close(actual["after"], expected["after"], rtol=0, atol=5 * atol)
    for step, other in zip(actual["metrics"], expected["metrics"], strict=True):
        assert step["loss"] == pytest.approx(other["loss"], abs=atol)
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=5 * atol)
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], tensor, rtol=0, atol=atol)

"""B sequences, N all tokens of a batch end to end, V vocabulary."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from components.batch import Batch
from components.models import logprobs
from components.models.causal import evaluate, load_policy, load_value_model, token_logprobs, token_values
from tests.components.helpers.freed_worker import kept_when_freed
from tests.components.helpers.ranks import run_ranks
from tests.messages import says

# Lengths 5, 1, 8, 2: padding on three rows, and a sequence of which nothing is predicted.
ROWS = [[2, 5, 9, 0, 1], [7], [2, 3, 4, 5, 6, 7, 8, 1], [11, 0]]


@pytest.fixture
def batch() -> Batch:
    return Batch.from_rows({"tokens": ROWS})


def logits_of(folder: Path, row: list[int]) -> Tensor:
    """[T, V] of one sequence alone, without padding."""
    with torch.no_grad():
        return load_policy(folder)(input_ids=torch.tensor([row])).logits[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_each_sequence_alone(tied_model: Path, batch: Batch, temperature: float) -> None:
    output = token_logprobs(load_policy(tied_model), batch, temperature=temperature, with_entropy=True)
    assert output.entropy_N is not None
    for i, row in enumerate(ROWS):
        expected, entropy = [0.0], [0.0]
        for t in range(1, len(row)):
            logprob_V = (logits_of(tied_model, row)[t - 1] / temperature).log_softmax(-1)
            expected.append(logprob_V[row[t]].item())
            entropy.append(-(logprob_V.exp() * logprob_V).sum().item())
        own_N = batch.sequence_ids == i
        assert output.logprob_N[own_N].tolist() == pytest.approx(expected, abs=1e-5)
        assert output.entropy_N[own_N].tolist() == pytest.approx(entropy, abs=1e-5)


def test_entropy_is_only_computed_when_asked_for(tied_model: Path, batch: Batch) -> None:
    assert token_logprobs(load_policy(tied_model), batch).entropy_N is None


def test_temperature_0_counts_as_1(tied_model: Path, batch: Batch) -> None:
    model = load_policy(tied_model)
    greedy_N = token_logprobs(model, batch, temperature=0.0).logprob_N
    assert torch.equal(greedy_N, token_logprobs(model, batch, temperature=1.0).logprob_N)


def gradients(folder: Path, batches: list[Batch]) -> list[Tensor]:
    model = load_policy(folder)
    for batch in batches:
        token_logprobs(model, batch, temperature=0.8).logprob_N.sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_equal_those_of_each_sequence_alone(untied_model: Path, batch: Batch) -> None:
    together = gradients(untied_model, [batch])
    alone = gradients(untied_model, [batch.select([i]) for i in range(len(batch))])
    assert len(together) == len(alone) == 27  # 26 as in a tied Qwen2 of two layers, and the output matrix
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_handling_the_logits_in_pieces_changes_nothing(
    tied_model: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = token_logprobs(load_policy(tied_model), batch, with_entropy=True)
    whole_gradients = gradients(tied_model, [batch])
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", {"cpu": 5 * 20})  # 5 of the 12 predicted tokens at a time
    pieces = token_logprobs(load_policy(tied_model), batch, with_entropy=True)
    torch.testing.assert_close(pieces.logprob_N, whole.logprob_N)
    torch.testing.assert_close(pieces.entropy_N, whole.entropy_N)
    for a, b in zip(gradients(tied_model, [batch]), whole_gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_entropy_of_a_uniform_distribution_is_the_log_of_the_vocabulary(tied_model: Path, batch: Batch) -> None:
    model = load_policy(tied_model)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()  # tied: all logits become 0
    entropy_N = token_logprobs(model, batch, with_entropy=True).entropy_N
    assert entropy_N is not None
    assert entropy_N[1].item() == pytest.approx(2.995732, abs=1e-5)  # log 20
    assert entropy_N[0].item() == 0.0


def test_bfloat16_logits_give_float32_logprobs(tied_model: Path, batch: Batch) -> None:
    output = token_logprobs(load_policy(tied_model, dtype="bfloat16"), batch)
    assert output.logprob_N.dtype == torch.float32


def test_gradient_checkpointing_changes_no_gradient(tied_model: Path, batch: Batch) -> None:
    model = load_policy(tied_model, gradient_checkpointing=True).train()
    token_logprobs(model, batch, temperature=0.8).logprob_N.sum().backward()
    for parameter, expected in zip(model.parameters(), gradients(tied_model, [batch]), strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("max_tokens", [1, 8, 10**6])
def test_evaluation_in_micro_batches_keeps_the_order(tied_model: Path, batch: Batch, max_tokens: int) -> None:
    model, sizes = load_policy(tied_model), []

    def compute(micro_batch: Batch) -> Tensor:
        sizes.append(len(micro_batch))
        return token_logprobs(model, micro_batch).logprob_N

    logprob_N = evaluate(batch, batch.micro_batch_indices(max_tokens), "cpu", compute)
    torch.testing.assert_close(logprob_N, token_logprobs(model, batch).logprob_N.detach(), atol=1e-5, rtol=0)
    assert not logprob_N.requires_grad
    # By length 1, 2, 5, 8: of 8 tokens, padding included, only the first two fit together.
    assert sizes == {1: [1, 1, 1, 1], 8: [2, 1, 1], 10**6: [4]}[max_tokens]
    assert evaluate(batch.select([]), [], "cpu", compute).tolist() == []
    sizes.clear()
    few_N = evaluate(batch, batch.micro_batch_indices(max_tokens, 3), "cpu", compute)
    torch.testing.assert_close(few_N, logprob_N, atol=1e-5, rtol=0)
    assert sizes == {1: [1, 1, 1, 1], 8: [2, 1, 1], 10**6: [3, 1]}[max_tokens]


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


def test_a_saved_value_model_comes_back_and_loads_as_a_classifier(
    untied_model: Path, batch: Batch, tmp_path: Path
) -> None:
    model = load_value_model(untied_model, seed=5)
    with torch.no_grad():
        model.score.weight.mul_(3)
    model.save_pretrained(tmp_path)
    assert torch.equal(token_values(load_value_model(tmp_path), batch), token_values(model, batch))
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(classifier.score.weight, model.score.weight)


def test_a_classifier_of_several_classes_is_no_value_model(untied_model: Path, tmp_path: Path) -> None:
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
    # transformers would make up a head for it, so the folder does not claim to be its classifier.
    assert json.loads((tmp_path / "config.json").read_text()).get("architectures") is None


def test_normalised_values_are_the_scores_minus_the_mean_by_the_deviation(
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


def test_a_critic_that_does_not_normalise_forgets_the_statistics_it_started_from(
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
def test_statistics_that_normalise_nothing_are_refused(
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


def test_a_backbone_that_is_not_whole_is_refused(untied_model: Path, tmp_path: Path) -> None:
    load_value_model(untied_model).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=says(tmp_path, "Qwen2Model", "norm.weight")):
        load_value_model(tmp_path)


def test_the_attention_that_was_asked_for_is_used_and_gives_the_same_numbers(tied_model: Path, batch: Batch) -> None:
    eager = load_policy(tied_model, attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"
    assert load_policy(tied_model).config._attn_implementation == "sdpa"  # what transformers chooses
    torch.testing.assert_close(
        token_logprobs(eager, batch).logprob_N, token_logprobs(load_policy(tied_model), batch).logprob_N
    )
    critic = load_value_model(tied_model, attn_implementation="eager")
    assert critic.backbone.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="nonsense"):
        load_policy(tied_model, attn_implementation="nonsense")


def test_an_unknown_dtype_is_named(tied_model: Path) -> None:
    with pytest.raises(ValueError, match=says("dtype='float8'", "bfloat16", "float32")):
        load_policy(tied_model, dtype="float8")


def test_memory_that_a_small_model_frees_is_kept_and_that_of_a_large_one_is_given_back(tmp_path: Path) -> None:
    ((large, small),) = run_ranks(kept_when_freed, 1, tmp_path)
    assert small >= 2**27
    assert large < 2**24

"""B sequences, N all tokens of a batch end to end, V vocabulary."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from components.batch import Batch
from components.engines import causal
from components.engines.causal import evaluate, load_policy, load_value_model, token_logprobs, token_values

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
    monkeypatch.setattr(causal, "_CHUNK_ELEMENTS", 5 * 20)  # 5 of the 12 predicted tokens at a time
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

    logprob_N = evaluate(batch, max_tokens, "cpu", compute)
    torch.testing.assert_close(logprob_N, token_logprobs(model, batch).logprob_N.detach(), atol=1e-5, rtol=0)
    assert not logprob_N.requires_grad
    # By length 1, 2, 5, 8: of 8 tokens, padding included, only the first two fit together.
    assert sizes == {1: [1, 1, 1, 1], 8: [2, 1, 1], 10**6: [4]}[max_tokens]
    assert evaluate(batch.select([]), max_tokens, "cpu", compute).tolist() == []


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
    with pytest.raises(ValueError, match=r"score.weight .* has shape \[2, 64\], not \[1, 64\]"):
        load_value_model(tmp_path)


def test_an_unknown_dtype_is_named(tied_model: Path) -> None:
    with pytest.raises(ValueError, match="dtype='float8' is not supported; use one of"):
        load_policy(tied_model, dtype="float8")


def test_configurations_import_without_torch_and_engines_without_deepspeed() -> None:
    script = (
        "import sys; import components.engines.config, components.engines.sampling; assert 'torch' not in sys.modules;"
        "import components.engines.hf_engine, components.engines.deepspeed_engine;"
        "assert not {'deepspeed', 'ray', 'vllm'} & set(sys.modules)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

"""B sequences, N all tokens of a batch end to end, V vocabulary."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from components.batch import Batch
from components.models import logprobs
from components.models.causal import token_logprobs
from components.models.loading import load_policy

# Lengths 5, 1, 8, 2: padding on three rows, and a sequence without a predicted token.
ROWS = [[2, 5, 9, 0, 1], [7], [2, 3, 4, 5, 6, 7, 8, 1], [11, 0]]


@pytest.fixture
def batch() -> Batch:
    return Batch.from_rows({"tokens": ROWS})


def logits_of(folder: Path, row: list[int]) -> Tensor:
    """Return logits [T, V] of a single sequence, without padding."""
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


def test_entropy_is_computed_only_on_request(tied_model: Path, batch: Batch) -> None:
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
    assert len(together) == len(alone) == 27  # 26 parameters of a tied Qwen2 with two layers, and the output matrix
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("packing", [True, False])
def test_a_mask_leaves_out_the_other_tokens(tied_model: Path, packing: bool) -> None:
    """Rows 0 and 2 share four tokens when packed. Different tokens of the mask follow the last one that they share."""
    rows = [[2, 3, 4, 5, 0, 1], [7], [2, 3, 4, 5, 6, 7, 8, 1], [11, 0]]
    mask_N = torch.tensor([False] * 4 + [True] * 2 + [True] + [False] * 4 + [True, False, True, True] + [False] * 2)
    batch = Batch.from_rows({"tokens": rows}).with_tokens(mask=mask_N)
    model = load_policy(tied_model, packing=packing)
    whole = token_logprobs(model, batch, with_entropy=True)
    whole.logprob_N[mask_N].sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    read = token_logprobs(model, batch, with_entropy=True, mask="mask")
    read.logprob_N[mask_N].sum().backward()
    assert whole.entropy_N is not None
    assert read.entropy_N is not None
    # The first token of row 1 is in the mask, and no token is before it.
    torch.testing.assert_close(read.logprob_N, whole.logprob_N.where(mask_N, 0.0))
    torch.testing.assert_close(read.entropy_N, whole.entropy_N.where(mask_N, 0.0))
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_computing_logits_in_chunks_does_not_change_results(
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
        model.model.embed_tokens.weight.zero_()  # tied weights: all logits become 0
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

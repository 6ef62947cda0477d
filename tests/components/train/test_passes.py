"""N all tokens of a batch end to end."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from components.batch import Batch
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.train.passes import evaluate

# Lengths 5, 1, 8, 2: padding on three rows, and a sequence without a predicted token.
ROWS = [[2, 5, 9, 0, 1], [7], [2, 3, 4, 5, 6, 7, 8, 1], [11, 0]]


@pytest.fixture
def batch() -> Batch:
    return Batch.from_rows({"tokens": ROWS})


@pytest.mark.parametrize("max_tokens", [1, 8, 10**6])
def test_evaluation_in_micro_batches_keeps_the_order(tied_model: Path, batch: Batch, max_tokens: int) -> None:
    model, sizes = load_policy(tied_model), []

    def compute(micro_batch: Batch) -> Tensor:
        sizes.append(len(micro_batch))
        return token_logprobs(model, micro_batch).logprob_N

    logprob_N = evaluate(batch, batch.micro_batch_indices(max_tokens), "cpu", compute)
    torch.testing.assert_close(logprob_N, token_logprobs(model, batch).logprob_N.detach(), atol=1e-5, rtol=0)
    assert not logprob_N.requires_grad
    # Sorted lengths 1, 2, 5, 8: within 8 tokens, padding included, only the first two fit together.
    assert sizes == {1: [1, 1, 1, 1], 8: [2, 1, 1], 10**6: [4]}[max_tokens]
    assert evaluate(batch.select([]), [], "cpu", compute).tolist() == []
    sizes.clear()
    few_N = evaluate(batch, batch.micro_batch_indices(max_tokens, 3), "cpu", compute)
    torch.testing.assert_close(few_N, logprob_N, atol=1e-5, rtol=0)
    assert sizes == {1: [1, 1, 1, 1], 8: [2, 1, 1], 10**6: [3, 1]}[max_tokens]

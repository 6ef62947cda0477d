"""B sequences, N all tokens of a batch end to end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from components.batch import Batch
from components.engines.causal import load_policy, token_logprobs
from components.engines.shared_prompts import answer_logprobs

EQUAL = [[5, 6, 7, 8], [9, 3, 2, 4]]
UNEQUAL = [[5, 6, 7, 8], [9], [0, 3, 3]]
ANSWERS = [[4, 1], [11, 10, 2, 1], [7, 7, 1]]


def answers_to(prompts: list[list[int]]) -> Batch:
    """Three answers to each prompt, and a weight for each token."""
    rows = [prompt + answer for prompt in prompts for answer in ANSWERS]
    masks = [[False] * len(prompt) + [True] * len(answer) for prompt in prompts for answer in ANSWERS]
    batch = Batch.from_rows({"tokens": rows, "action_mask": masks})
    weight_N = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    return batch.with_tokens(weight=weight_N * batch["action_mask"])


def passes_of(model: Any) -> list[list[int]]:
    """Shapes of what the model reads, filled in as it does."""
    shapes: list[list[int]] = []
    model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(list(inputs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def gradient(model: Any, logprob_N: Tensor, weight_N: Tensor) -> Tensor:
    model.zero_grad()
    (logprob_N * weight_N).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("prompts", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_reading_each_prompt_once_changes_neither_results_nor_gradients(
    tied_model: Path, prompts: list[list[int]]
) -> None:
    model, batch = load_policy(tied_model), answers_to(prompts)
    mask_N, weight_N = batch["action_mask"], batch["weight"]
    whole = token_logprobs(model, batch, 0.7, with_entropy=True)
    whole_grad = gradient(model, whole.logprob_N, weight_N)
    shapes = passes_of(model)
    parts = answer_logprobs(model, batch, 0.7, with_entropy=True)
    # Of 4 or 3 prompt tokens all but the last, then the last one and an answer of 4 without its last.
    assert shapes == [[len(prompts), 3], [3 * len(prompts), 4]]
    assert whole.entropy_N is not None and parts.entropy_N is not None
    torch.testing.assert_close(parts.logprob_N[mask_N], whole.logprob_N[mask_N], rtol=0, atol=1e-5)
    torch.testing.assert_close(parts.entropy_N[mask_N], whole.entropy_N[mask_N], rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient(model, parts.logprob_N, weight_N), whole_grad, rtol=1e-4, atol=1e-5)


def test_prompts_that_nothing_shares_are_read_with_their_answers(tied_model: Path) -> None:
    model, batch = load_policy(tied_model), answers_to(EQUAL).select([0, 4])
    expected_N = token_logprobs(model, batch).logprob_N
    shapes = passes_of(model)
    assert torch.equal(answer_logprobs(model, batch).logprob_N, expected_N)
    assert shapes == [[2, 7]]  # 4 + 4 tokens, of which the last predicts nothing


def test_recomputed_activations_are_of_one_pass(tied_model: Path) -> None:
    model, batch = load_policy(tied_model, gradient_checkpointing=True).train(), answers_to(EQUAL)
    shapes = passes_of(model)
    answer_logprobs(model, batch)
    assert shapes == [[6, 7]]

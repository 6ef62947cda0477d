"""Loss of supervised fine-tuning."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.supervised import sft_loss


def test_only_trained_tokens_affect_the_loss() -> None:
    logprob_N = torch.tensor([float("-inf"), -1.0, -2.0], requires_grad=True)
    out = sft_loss(logprob_N, torch.tensor([False, True, True]), 4)
    out.loss.backward()
    assert out.loss.item() == 0.75
    assert out.metrics["nll"].item() == 0.75
    assert logprob_N.grad is not None
    assert logprob_N.grad.tolist() == [0.0, -0.25, -0.25]


@given(st.lists(st.tuples(st.booleans(), st.floats(-9, 0)), min_size=1, max_size=10))
@settings(max_examples=50, deadline=None)
def test_the_loss_agrees_with_a_scalar_loop(tokens: list[tuple[bool, float]]) -> None:
    mask, logprobs = zip(*tokens)
    actual = sft_loss(torch.tensor(logprobs), torch.tensor(mask), 5).loss.item()
    assert actual == pytest.approx(-sum(x for learn, x in tokens if learn) / 5, abs=1e-5)

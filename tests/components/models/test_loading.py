"""Causal models loaded with the requested attention and dtype."""

from pathlib import Path

import pytest
import torch

from components.batch import Batch
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.models.value_model import load_value_model
from tests.messages import says

# Lengths 5, 1, 8, 2: padding on three rows, and a sequence without a predicted token.
ROWS = [[2, 5, 9, 0, 1], [7], [2, 3, 4, 5, 6, 7, 8, 1], [11, 0]]


@pytest.fixture
def batch() -> Batch:
    return Batch.from_rows({"tokens": ROWS})


def test_the_requested_attention_is_used_with_equal_results(tied_model: Path, batch: Batch) -> None:
    eager = load_policy(tied_model, attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"
    assert load_policy(tied_model).config._attn_implementation == "sdpa"  # the default of transformers
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

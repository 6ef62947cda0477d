"""Totals of a mini-batch, by which its losses are divided."""

import pytest
import torch

from components.batch import Batch
from components.rl.aggregation import Totals
from components.train.engine import totals_of
from tests.messages import says


def test_a_loss_is_divided_by_the_trained_tokens_of_the_whole_minibatch() -> None:
    batch = Batch.from_rows({"tokens": [[1, 2, 3], [4, 5]], "loss_mask": [[False, True, True], [False, True]]})
    batch = batch.with_tokens(loss_mask=batch["loss_mask"].bool())
    assert totals_of(batch) == Totals(tokens=3, sequences=2, rows=2)
    actions_N = torch.tensor([False, False, True, False, False])
    assert totals_of(batch.with_tokens(action_mask=actions_N)) == Totals(tokens=1, sequences=1, rows=2)
    assert totals_of(batch.only("tokens")) == Totals(tokens=5, sequences=2, rows=2)
    with pytest.raises(ValueError, match=says("loss_mask", "5 tokens")):
        totals_of(batch.with_tokens(loss_mask=torch.zeros(5, dtype=torch.bool)))
    with pytest.raises(ValueError, match="train_step"):
        totals_of(batch.select([]))


def test_a_sequence_without_a_trained_token_is_not_counted() -> None:
    # Lengths 2, 0, 1, 3. The second has no token, and the first has no trained token.
    batch = Batch(torch.tensor([2, 0, 1, 3]), {"tokens": torch.arange(6)})
    mask_N = torch.tensor([False, False, True, True, False, True])
    assert totals_of(batch) == Totals(tokens=6, sequences=3, rows=4)
    assert totals_of(batch.with_tokens(action_mask=mask_N)) == Totals(tokens=3, sequences=2, rows=4)
    # If both masks exist, the action mask selects the trained tokens.
    both = batch.with_tokens(action_mask=mask_N, loss_mask=torch.ones(6, dtype=torch.bool))
    assert totals_of(both) == Totals(tokens=3, sequences=2, rows=4)

"""Computed tokens of layouts, counted by hand."""

import torch

from components.batch import Batch
from components.models.packing.layout import END_TO_END, PADDED


def test_padding_counts_as_computed_and_packed_rows_have_none() -> None:
    minibatch = Batch([2, 3, 4], {"tokens": torch.arange(9)})
    plans = [[torch.tensor([0, 2])], [torch.tensor([1])]]
    assert PADDED.computed_tokens(minibatch, plans) == (2 * 4 + 3, 2 * 16 + 9)
    assert END_TO_END.computed_tokens(minibatch, plans) == (9, 4 + 9 + 16)

"""The preallocated cache. Legend: R rows, K key heads, S positions, D head size."""

from pathlib import Path

import torch
from transformers import DynamicCache

from components.models.loading import load_policy
from plugins.fast_decode.cache import spare_cache


def test_a_preallocated_cache_has_the_same_contents_as_that_of_transformers(tied_model: Path) -> None:
    model = load_policy(tied_model)
    roomy = spare_cache(model)
    plain = DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(0)

    def append(rows: int, positions: int) -> None:
        new = torch.randn(2, rows, 2, positions, 8, generator=generator)
        actual = roomy.update(new[0], new[1], 0)
        expected = plain.update(new[0], new[1], 0)
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
        assert roomy.get_seq_length() == plain.get_seq_length()

    def select(*rows: int) -> None:
        for cache in (roomy, plain):
            cache.batch_select_indices(torch.tensor(rows))

    append(3, 4)
    select(0, 0, 1, 2, 2)  # the samples of three prompts, with more positions than the first and second allocation
    for _ in range(40):  # more than the first room and the second
        append(5, 1)
    select(0, 4, 2, 3)  # row 1 is finished, and the last row replaces it
    append(4, 1)
    select(2, 1, 0)  # any order
    for _ in range(40):
        append(3, 1)

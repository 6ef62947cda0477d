"""Sizes of the part of a tensor-parallel rank, and of linear layers."""

from dataclasses import replace

from components.models.part_size import linear_sizes, part_of_rank
from components.models.size import ModelSize

# Two layers of 460 parameters and an embedding of 80. Heads have dimension 4, and two query heads share a key head.
SIZE = ModelSize(parameters=1000, layers=2, hidden=8, heads=4, queries=16, keys=8, intermediate=10, vocabulary=10)


def test_two_ranks_have_half_of_each_layer_and_of_the_vocabulary() -> None:
    part = part_of_rank(SIZE, 2)
    assert part == replace(SIZE, parameters=500, heads=2, queries=8, keys=4, intermediate=5, vocabulary=5)
    assert part_of_rank(SIZE, 1) == SIZE


def test_key_heads_and_a_vocabulary_that_cannot_be_divided_are_whole_on_each_rank() -> None:
    part = part_of_rank(SIZE, 4)
    # The projections of keys and values, 2 x 2 x 8 x 8 parameters, and the embedding.
    assert part.parameters == (920 - 256) // 4 + 256 + 80
    assert (part.heads, part.queries, part.keys, part.vocabulary) == (1, 4, 4, 10)


def test_linear_layers_have_the_sizes_of_attention_and_mlp() -> None:
    attention = {"q_proj": (8, 16), "k_proj": (8, 8), "v_proj": (8, 8), "o_proj": (16, 8)}
    mlp = {"gate_proj": (8, 10), "up_proj": (8, 10), "down_proj": (10, 8)}
    assert linear_sizes(SIZE) == attention | mlp
    assert linear_sizes(replace(SIZE, experts=4)) == attention

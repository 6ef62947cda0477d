"""Bytes that ranks send to each other in an optimizer step, compared with calculations by hand."""

from dataclasses import replace
from typing import Any

import pytest

from components.models.part_size import part_of_rank
from components.models.size import ModelSize
from components.train.config import TrainConfig
from plugins.plan.communication import sent_bytes
from plugins.plan.memory import MemoryEstimate, learning, together

# Two layers of 460 parameters and an embedding of 80. Heads have dimension 4, and two query heads share a key head.
DENSE = ModelSize(parameters=1000, layers=2, hidden=8, heads=4, queries=16, keys=8, intermediate=10, vocabulary=10)
# The same with 4 experts of 3 x 8 x 5 parameters in each layer, 2 of them per token.
MIXTURE = replace(DENSE, parameters=1960, experts=4, experts_per_token=2, mixtures=2)


def sent(size: ModelSize, ranks: int, tokens: int = 0, passes: int = 1, **settings: Any) -> dict[str, int]:
    config = TrainConfig(**({"engine": "fsdp", "zero_stage": 3} | settings))
    return sent_bytes(size, config, ranks, trained=size.parameters, tokens=tokens, passes=passes)


def test_partitioned_parameters_are_gathered_for_each_pass_and_gradients_reduced() -> None:
    # Two gathers of the layers, one of the embedding, one reduction of the gradients, all in float32. Half of them is
    # on the other rank.
    assert sent(DENSE, 2, passes=3) == {"data": 3 * 4 * (2 * 460 + 40 + 500)}
    assert sent(DENSE, 2, passes=3, precision="bf16") == {"data": 3 * (2 * (2 * 460 + 40) + 4 * 500)}
    # Between the passes of a step nothing is resharded, and nothing reduced.
    assert sent(DENSE, 4, passes=3, zero_stage=2) == {"data": 4 * 750 + 4 * 750}
    assert sent(DENSE, 1, passes=3) == {}


@pytest.mark.parametrize(
    ("stage", "numbers"),
    [(0, 2 * 500), (1, 500 + 500), (2, 500 + 3 * 500), (3, 3 * 2 * 500 + 3 * 500)],
)
def test_each_stage_of_deepspeed_gathers_and_reduces(stage: int, numbers: int) -> None:
    assert sent(DENSE, 2, passes=3, engine="deepspeed", zero_stage=stage) == {"data": 4 * numbers}


def test_context_parallel_ranks_exchange_heads_in_both_directions() -> None:
    # Queries, keys, values and outputs: half of them belongs to the other rank, in two layers, forward and backward.
    numbers = 2 * 2 * (16 + 8 + 8 + 16) // 2
    assert sent(DENSE, 2, tokens=100, context=2)["context"] == 100 * numbers * 4
    # Each of 4 ranks needs a key head, and there are two, so each is sent twice. Recomputation sends them once more.
    numbers = 3 * 2 * (16 + 16 + 16 + 16) * 3 // 4
    sent_by_axis = sent(DENSE, 4, tokens=100, context=4, precision="bf16", gradient_checkpointing=True)
    assert sent_by_axis["context"] == 100 * numbers * 2


def test_tensor_parallel_ranks_reduce_states_and_gather_their_shards() -> None:
    sent_by_axis = sent(DENSE, 4, tokens=100, tensor=2)
    part = part_of_rank(DENSE, 2)
    assert sent_by_axis["data"] == sent(part, 2)["data"]
    # 8 numbers in an all-reduce of two ranks after attention and MLP, in two layers, forward and backward.
    assert sent_by_axis["tensor"] == 100 * 2 * 2 * 2 * 8 * 4


def test_expert_parallel_ranks_exchange_states_and_gather_fewer_experts() -> None:
    alone = sent(MIXTURE, 4)
    shared = sent(MIXTURE, 4, tokens=100, expert=2)
    assert alone == {"data": 4 * (2 * 1880 + 80 + 1960) * 3 // 4}
    # 960 numbers belong to experts. Each half of them is on two ranks, which exchange half of it.
    other = (2 * 920 + 80 + 1000) * 3 // 4
    assert shared["data"] == 4 * (other + 3 * 480 // 2)
    # A state of 8 numbers is sent to 2 experts and back, half of them on the other rank, in two layers, forward and
    # backward.
    assert shared["expert"] == 100 * 4 * 2 * 2 * (2 * 2 * 8) // 2


def test_a_plan_counts_tokens_and_passes_of_a_rank() -> None:
    config = TrainConfig(engine="fsdp", zero_stage=3, context=2, max_tokens=40)
    # A pair of ranks has 4 of 8 sequences of 20 tokens, in two passes. Each rank of the pair has half of each sequence.
    assert learning(DENSE, config, 4, 20, 8).sends == sent(DENSE, 4, tokens=40, passes=2, context=2)
    assert learning(None, config, 4, 20, 8).sends == {}
    assert together(MemoryEstimate(sends={"data": 1}), MemoryEstimate(sends={"data": 2, "expert": 5})).sends == {
        "data": 3,
        "expert": 5,
    }

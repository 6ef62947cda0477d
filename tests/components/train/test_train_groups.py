"""Sequences that a loss compares stay together in every split of a mini-batch, for any number of ranks.

Legend: P pairs; B sequences; G groups.
"""

import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from components.batch import Batch
from components.models.packing.layout import END_TO_END, PADDED
from components.models.state_values import state_values
from components.models.value_model import load_value_model
from components.train.engine import shortest_group
from tests.components.helpers import train_cases
from tests.components.helpers.group_worker import CASES, minibatches, trained_on_pairs
from tests.components.helpers.ranks import WORLD_SIZES, run_ranks
from tests.messages import says

RecordsOf = Callable[[int], list[dict[str, Any]]]
"""Number of ranks -> record of each rank."""


@pytest.fixture(scope="module")
def records_of(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RecordsOf:
    root = tmp_path_factory.mktemp("groups")

    @cache
    def run(world_size: int) -> list[dict[str, Any]]:
        return run_ranks(trained_on_pairs, world_size, root / str(world_size), str(tied_model))

    return run


@pytest.fixture(scope="module")
def plain(tied_model: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same training in plain torch, one pair after the other."""
    model = load_value_model(tied_model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": train_cases.WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=train_cases.BETAS, eps=train_cases.EPS)
    metrics = []
    # 4 steps in total, linear decay without warm-up
    for share, batch in zip((1.0, 0.75, 0.5), minibatches(), strict=True):
        gaps = []
        for i in range(0, len(batch), 2):
            chosen, rejected = (state_values(model, batch.select([k]))[-1] for k in (i, i + 1))
            gaps.append(chosen - rejected)
        gap_P = torch.stack(gaps)
        loss = torch.log1p(torch.exp(-gap_P)).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), train_cases.MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = train_cases.LEARNING_RATE * share
        optimizer.step()
        step_metrics = {"loss": loss, "grad_norm": norm, "accuracy": (gap_P > 0).float().mean(), "margin": gap_P.mean()}
        metrics.append({name: float(value.detach()) for name, value in step_metrics.items()})
    return metrics, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", CASES)
def test_training_on_pairs_equals_plain_torch_for_any_micro_batches(
    records_of: RecordsOf, plain: tuple[list[dict[str, float]], dict[str, Tensor]], world_size: int, case: str
) -> None:
    first, *others = (record[case] for record in records_of(world_size))
    for actual, expected in zip(first["metrics"], plain[0], strict=True):
        assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=2e-5, abs=1e-6)
    assert first["weights"].keys() == plain[1].keys()
    for name, expected in plain[1].items():
        torch.testing.assert_close(first["weights"][name], expected, atol=2e-5, rtol=1e-4)
    assert all(record["metrics"] == first["metrics"] for record in others)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_cases_have_different_micro_batches_of_whole_pairs(records_of: RecordsOf, world_size: int) -> None:
    ranks = records_of(world_size)
    for case in CASES:
        for record in ranks:
            for pairs in record[case]["passes"]:
                assert pairs[::2] == pairs[1::2]
        # All ranks make the same number of passes, although one has no data in the last step.
        assert len({len(record[case]["passes"]) for record in ranks}) == 1
    assert [len(pairs) for pairs in ranks[0]["one pair"]["passes"]] == [2] * len(ranks[0]["one pair"]["passes"])
    assert len(ranks[0]["one pair"]["passes"]) == (12 if world_size == 1 else 4 + 2 + 1)
    # Five sequences per micro-batch allow two pairs: 4 + 2 + 1 passes, or with two ranks 2 + 1 + 1.
    assert len(ranks[0]["few sequences"]["passes"]) == (7 if world_size == 1 else 4)
    assert len(ranks[0]["deepspeed"]["passes"]) == 3


@pytest.mark.full
def test_a_last_pair_evaluated_by_both_ranks_counts_once(records_of: RecordsOf) -> None:
    assert [record["deepspeed"]["passes"][-1] for record in records_of(2)] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", CASES)
def test_an_incomplete_pair_is_refused_on_all_ranks(records_of: RecordsOf, world_size: int, case: str) -> None:
    for record in records_of(world_size):
        assert re.search(says("5 sequences", "groups of 2"), record[case]["refused"])


LENGTHS = st.integers(1, 30)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Batch, int]:
    """Up to ten groups of one size from 1 to 4."""
    size, count = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    lengths = draw(st.lists(LENGTHS, min_size=size * count, max_size=size * count))
    return Batch(torch.tensor(lengths), {}), size


@given(
    made=grouped(),
    ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 200),
    max_sequences=st.integers(0, 9),
    packing=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_group_is_never_split(
    made: tuple[Batch, int], ranks: int, max_tokens: int, max_sequences: int, packing: bool
) -> None:
    batch, size = made
    layout = END_TO_END if packing else PADDED
    plans = layout.micro_batches_by_rank(batch, ranks, max_tokens, max_sequences, size)
    assert len(plans) == ranks
    cuts = [index.tolist() for plan in plans for index in plan]
    assert sorted(position for cut in cuts for position in cut) == list(range(len(batch)))
    for cut in cuts:
        groups = [cut[i : i + size] for i in range(0, len(cut), size)]
        assert all(group[0] % size == 0 for group in groups)
        assert all(later == earlier + 1 for group in groups for earlier, later in pairwise(group))
        if len(groups) > 1:
            lengths = [int(batch.lengths[position]) for position in cut]
            assert (sum(lengths) if packing else len(cut) * max(lengths)) <= max_tokens
            assert len(cut) <= (max_sequences or len(cut))
    # A rank without data evaluates a complete group, the shortest one.
    spare = shortest_group(batch, size).tolist()
    totals = [int(batch.lengths[i : i + size].sum()) for i in range(0, len(batch), size)]
    assert spare == list(range(spare[0], spare[0] + size))
    assert spare[0] % size == 0
    assert int(batch.lengths[spare].sum()) == min(totals)


def test_groups_of_one_have_the_micro_batches_of_single_sequences() -> None:
    batch = Batch(torch.tensor([5, 3, 9, 1, 7]), {})
    plans = PADDED.micro_batches_by_rank(batch, 2, max_tokens=10, max_sequences=2)
    for plan, share in zip(plans, batch.balanced_shares(2), strict=True):
        cuts = Batch(batch.lengths[share], {}).micro_batch_indices(10, 2)
        assert [index.tolist() for index in plan] == [share[cut].tolist() for cut in cuts]


def test_ranks_get_similar_numbers_of_tokens_in_whole_groups() -> None:
    # Pairs of 20, 20, 3 and 9 tokens: each rank gets a long one, regardless of their first sequences.
    batch = Batch(torch.tensor([1, 19, 9, 11, 2, 1, 8, 1]), {})
    plans = PADDED.micro_batches_by_rank(batch, 2, max_tokens=1000, group_size=2)
    assert sorted(sum(int(batch.lengths[index].sum()) for index in plan) for plan in plans) == [23, 29]

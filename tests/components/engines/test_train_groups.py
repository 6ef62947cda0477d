"""Sequences that a loss compares stay together: whatever cuts a minibatch, and on however many ranks.

P pairs; B sequences; G groups.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from components.batch import Batch
from components.engines.causal import load_value_model, state_values
from components.engines.config import TrainConfig
from components.engines.train_engine import _plan, _shortest
from tests.components.engines import train_cases
from tests.components.engines.conftest import RunRanks
from tests.components.engines.group_worker import CASES, minibatches

pytestmark = pytest.mark.timeout(300)  # three processes that import DeepSpeed, maybe on a busy machine

Records = dict[int, list[dict[str, Any]]]
"""By number of ranks, what each has written down."""


@pytest.fixture(scope="module")
def records(tied_model: Path, tmp_path_factory: pytest.TempPathFactory, run_ranks: RunRanks) -> Records:
    root = tmp_path_factory.mktemp("groups")
    run_ranks({size: [str(tied_model), str(root / str(size))] for size in (1, 2)}, "group_worker.py")
    return {
        size: [torch.load(root / str(size) / f"rank{rank}.pt", weights_only=False) for rank in range(size)]
        for size in (1, 2)
    }


@pytest.fixture(scope="module")
def plain(tied_model: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same training with torch alone, one pair after the other."""
    model = load_value_model(tied_model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": train_cases.WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=train_cases.BETAS, eps=train_cases.EPS)
    metrics = []
    # 4 steps in all, linear decay without warm-up
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
        found = {"loss": loss, "grad_norm": norm, "accuracy": (gap_P > 0).float().mean(), "margin": gap_P.mean()}
        metrics.append({name: float(value.detach()) for name, value in found.items()})
    return metrics, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_training_on_pairs_equals_plain_torch_however_they_are_cut(
    records: Records, plain: tuple[list[dict[str, float]], dict[str, Tensor]], world_size: int, case: str
) -> None:
    for found, expected in zip(records[world_size][0][case]["metrics"], plain[0], strict=True):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=2e-5, abs=1e-6)
    found_weights = records[world_size][0][case]["weights"]
    assert found_weights.keys() == plain[1].keys()
    for name, expected in plain[1].items():
        torch.testing.assert_close(found_weights[name], expected, atol=2e-5, rtol=1e-4)
    for record in records[world_size]:
        assert record[case]["metrics"] == records[world_size][0][case]["metrics"]


def test_the_cases_cut_the_pairs_in_different_ways_and_never_a_pair(records: Records) -> None:
    for world_size, ranks in records.items():
        for case in CASES:
            for record in ranks:
                for pairs in record[case]["passes"]:
                    assert pairs[::2] == pairs[1::2]
            # All ranks make as many passes, though one has nothing of its own in the last step.
            assert len({len(record[case]["passes"]) for record in ranks}) == 1
        assert [len(pairs) for pairs in ranks[0]["one pair"]["passes"]] == [2] * len(ranks[0]["one pair"]["passes"])
        assert len(ranks[0]["one pair"]["passes"]) == (12 if world_size == 1 else 4 + 2 + 1)
        # Room for five sequences is room for two pairs: 4 + 2 + 1 passes, or with two ranks 2 + 1 + 1.
        assert len(ranks[0]["few sequences"]["passes"]) == (7 if world_size == 1 else 4)
        assert len(ranks[0]["deepspeed"]["passes"]) == 3
    # The pair of the last step is looked at by both ranks, and counts once.
    assert [record["deepspeed"]["passes"][-1] for record in records[2]] == [[0, 0], [0, 0]]


def test_part_of_a_pair_is_refused_on_all_ranks(records: Records) -> None:
    found = {record[case]["refused"] for ranks in records.values() for record in ranks for case in CASES}
    assert found == {"the minibatch has 5 sequences, which are no groups of 2"}


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
def test_a_group_is_never_parted(
    made: tuple[Batch, int], ranks: int, max_tokens: int, max_sequences: int, packing: bool
) -> None:
    batch, size = made
    config = TrainConfig(max_tokens=max_tokens, max_sequences=max_sequences, packing=packing)
    plans = _plan(batch, ranks, config, size)
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
    # What a rank looks at when it has nothing of its own is a whole group, and the shortest.
    spare = _shortest(batch, size).tolist()
    totals = [int(batch.lengths[i : i + size].sum()) for i in range(0, len(batch), size)]
    assert spare == list(range(spare[0], spare[0] + size))
    assert spare[0] % size == 0
    assert int(batch.lengths[spare].sum()) == min(totals)


def test_groups_of_one_are_cut_as_before_there_were_groups() -> None:
    batch = Batch(torch.tensor([5, 3, 9, 1, 7]), {})
    config = TrainConfig(max_tokens=10, max_sequences=2)
    for plan, share in zip(_plan(batch, 2, config), batch.balanced_shares(2), strict=True):
        cuts = Batch(batch.lengths[share], {}).micro_batch_indices(10, 2)
        assert [index.tolist() for index in plan] == [share[cut].tolist() for cut in cuts]


def test_ranks_get_about_as_many_tokens_of_whole_groups() -> None:
    # Pairs of 20, 20, 3 and 9 tokens: a long one for each rank, whatever their first sequences are.
    batch = Batch(torch.tensor([1, 19, 9, 11, 2, 1, 8, 1]), {})
    plans = _plan(batch, 2, TrainConfig(max_tokens=1000), 2)
    assert sorted(sum(int(batch.lengths[index].sum()) for index in plan) for plan in plans) == [23, 29]

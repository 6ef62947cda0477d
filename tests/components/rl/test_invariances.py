"""Invariance of losses to the order of sequences, micro-batches, ranks, and environment tokens.

B sequences; N all tokens of a step end to end. The loss, the metrics and the gradient of each loss with each
aggregation are compared.
"""

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.batch import Batch
from components.rl.aggregation import Totals
from tests.components.rl.loss_cases import AGGREGATIONS, LOSSES, make_step, reduced, steps, totals_of
from tests.components.rl.loss_ranks import evaluate, whole_step
from tests.messages import says

NAN = math.nan
INF = math.inf
COLUMNS = ("x", "old", "advantage")
every_loss = pytest.mark.parametrize("name", LOSSES)
Found = dict[str, Tensor]
"""Key "name of the loss, quantity" -> aggregates by aggregation; metrics; or "gradient", the [N] gradient of the four
aggregates together, weighted so that no two can be exchanged.
"""
WEIGHTS = (1.0, 0.3, 0.07, 0.5)


def looked_at(step: Batch, totals: Totals | None = None) -> Found:
    totals = totals or totals_of(step)
    actual: Found = {}
    weighed: list[Tensor] = []
    trained = {name: step["x"].clone().requires_grad_() for name in LOSSES}
    for name, loss in LOSSES.items():
        outputs = reduced(loss, trained[name], step, totals)
        for weight, (aggregation, out) in zip(WEIGHTS, outputs.items()):
            assert not any(x.requires_grad for x in out.metrics.values())
            weighed.append(weight * out.loss)
            actual[f"{name}, {aggregation}"] = out.loss.detach()
            actual |= {f"{name}, {metric}": x for metric, x in out.metrics.items()}
    gradients = torch.autograd.grad(torch.stack(weighed).sum(), list(trained.values()))
    return actual | {f"{name}, gradient": x_N for name, x_N in zip(LOSSES, gradients)}


def assert_same(actual: Found, expected: Found) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.allclose(actual[name], x, rtol=1e-5, atol=1e-5), name


def gradients_at(values: Found, index_N: Tensor) -> Found:
    return {name: x[index_N] if name.endswith("gradient") else x for name, x in values.items()}


def garbage(step: Batch, seed: int) -> Batch:
    """Return the same step with arbitrary environment tokens."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.tensor([NAN, INF, -INF, 0.0, 1e30, -1e30, 1.0])

    def written(x_N: Tensor) -> Tensor:
        return torch.where(step["mask"], x_N, choices[torch.randint(0, 7, x_N.shape, generator=generator)])

    flags = {name: step[name] | ~step["mask"] for name in ("dropped", "held")}
    return step.with_tokens(**{name: written(step[name]) for name in COLUMNS}, **flags)


@given(step=steps("usual"), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_order_of_sequences_changes_nothing(step: Batch, seed: int) -> None:
    order_B = torch.randperm(len(step), generator=torch.Generator().manual_seed(seed))
    # Previous position of each token of the permuted step.
    place_N = step.with_tokens(place=torch.arange(step.num_tokens)).select(order_B)["place"]
    assert_same(looked_at(step.select(order_B)), gradients_at(looked_at(step), place_N))


@given(step=steps("usual"), cuts=st.lists(st.integers(0, 4), min_size=1, max_size=2))
@settings(max_examples=40, deadline=None)
def test_the_size_of_micro_batches_does_not_change_the_loss(step: Batch, cuts: list[int]) -> None:
    # A part may be empty or without action tokens.
    edges = [0, *sorted(min(cut, len(step)) for cut in cuts), len(step)]
    totals = totals_of(step)
    parts = [looked_at(step.select(slice(a, b)), totals) for a, b in pairwise(edges)]
    summed = {
        key: torch.cat([part[key] for part in parts])
        if key.endswith("gradient")
        else torch.stack([part[key] for part in parts]).sum(0)
        for key in parts[0]
    }
    assert_same(summed, looked_at(step))


@given(step=steps("usual"), seed=st.integers(0, 10**6), most=st.sampled_from([3, 100]))
@settings(max_examples=40, deadline=None)
def test_inserted_environment_tokens_do_not_change_results(step: Batch, seed: int, most: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows: dict[str, list[Tensor]] = {column: [] for column in (*step.per_token, "is_new")}
    for i, length in enumerate(step.lengths.tolist()):
        more = int(torch.randint(0, most + 1, (1,), generator=generator))
        is_new = torch.randperm(length + more, generator=generator) < more
        rows["is_new"].append(is_new)
        for column, x_N in step.per_token.items():
            longer = torch.zeros(length + more, dtype=x_N.dtype)
            longer[~is_new] = step.row(i, column)
            rows[column].append(longer)
    filled = garbage(Batch.from_rows(rows), seed)
    actual = looked_at(filled)
    for key, x in actual.items():
        assert not key.endswith("gradient") or not x[filled["is_new"]].any(), key
    assert_same(gradients_at(actual, ~filled["is_new"]), looked_at(step))


@given(step=steps(), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_environment_tokens_do_not_change_any_bit_and_losses_are_finite_for_any_policy(step: Batch, seed: int) -> None:
    expected = looked_at(step)
    actual = looked_at(garbage(step, seed))
    for key, x in expected.items():
        assert torch.equal(actual[key], x), key
        assert x.isfinite().all(), key
        assert not key.endswith("gradient") or not x[~step["mask"]].any(), key


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3], [1, 0, 4]])
def test_without_action_tokens_loss_metrics_and_gradients_are_zero(lengths: list[int]) -> None:
    step = garbage(make_step(lengths, seed=1, acting=0.0), seed=1)
    actual = looked_at(step, Totals(tokens=3, sequences=2))
    for key, x in actual.items():
        assert x.tolist() == ([0.0] * sum(lengths) if key.endswith("gradient") else 0.0), key


REACHES_ITS_ANSWER = {"gspo": ("x", "old"), "geo_mean": COLUMNS}
"""Columns in which a NaN gives a NaN at all action tokens of the response. In other columns it does so only at its own
token.
"""
NOT_READ = {
    "reinforce": ("old",),
    **dict.fromkeys([k for k in LOSSES if k[:2] in ("k1", "k2", "k3", "ab")], ("advantage",)),
}


@pytest.mark.parametrize("column", COLUMNS)
@every_loss
def test_a_nan_of_an_action_token_is_returned_at_its_position(name: str, column: str) -> None:
    step = make_step([6, 9, 4], seed=2)
    acting_N = step["mask"]
    own_N = step.sequence_ids == 1
    # A token that is neither dropped nor penalised, and is not the only one of its response.
    place = int((acting_N & own_N & ~step["dropped"] & ~step["held"]).nonzero()[1])
    step = step.with_tokens(**{column: step[column].index_fill(0, torch.tensor([place]), NAN)})
    loss_N = LOSSES[name](step["x"], step).loss_N
    expected_N = torch.zeros_like(acting_N)
    if column in REACHES_ITS_ANSWER.get(name, ()):
        expected_N = acting_N & own_N
    elif column not in NOT_READ.get(name, ()):
        expected_N[place] = True
    assert torch.equal(loss_N.isnan(), expected_N)
    out = reduced(LOSSES[name], step["x"], step, totals_of(step))
    assert [bool(out[aggregation].loss.isnan()) for aggregation in AGGREGATIONS] == [bool(expected_N.any())] * 5


@every_loss
def test_columns_of_another_length_than_the_mask_raise_an_error(name: str) -> None:
    step = make_step([3, 2], seed=1)
    for x_N in (step["x"][:4], step["x"][:, None]):
        with pytest.raises(ValueError, match=says("_N", list(x_N.shape), "[5]")):
            LOSSES[name](x_N, step)
    with pytest.raises(ValueError, match=says("mask", "torch.float32")):
        LOSSES[name](step["x"], step.with_tokens(mask=step["mask"].float()))


def test_the_number_of_ranks_does_not_change_losses_or_gradients(tmp_path: Path) -> None:
    script = Path(__file__).with_name("loss_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(rank), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    step = whole_step()
    alone = evaluate([step], totals_of(step))
    assert len({key.partition(",")[0] for key in alone}) == len(LOSSES)
    for rank in range(2):
        assert_same(torch.load(tmp_path / f"rank{rank}.pt"), alone)

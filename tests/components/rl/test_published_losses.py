"""With matching options our losses, aggregations and corrections equal those of verl, to 1e-6.

Legend: B sequences; T tokens of the longest; N tokens end to end. verl's formulas are in `published`. Intended
differences are in `test_published_differences`.
"""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.rl.aggregation import Aggregation, TokenLoss, Totals, aggregate
from components.rl.correction import Estimator, Level, importance_weights, rejection_weights
from components.rl.covariance_losses import clip_cov_loss, clip_cov_tokens, covariances, kl_cov_loss, kl_cov_tokens
from components.rl.mismatch import mismatch_metrics
from components.rl.policy_losses import gspo_loss, reinforce_loss
from components.rl.ratio_losses import cispo_loss, dppo_loss, geo_mean_loss, sapo_loss
from tests.components.rl import published
from tests.components.rl.published import (
    Step,
    assert_same,
    assert_same_loss,
    assert_same_tokens,
    steps,
)

TRIES = settings(max_examples=25, deadline=None)

LOSSES: dict[str, tuple[Callable[..., TokenLoss], Callable[..., Tensor]]] = {
    "dppo_tv": (
        lambda *columns: dppo_loss(*columns, divergence="tv", clip_low=0.1, clip_high=0.07),
        lambda x, old, advantage: published.verl_dppo(x, old, advantage, "tv", 0.1, 0.07, 20.0),
    ),
    "dppo_kl": (
        lambda *columns: dppo_loss(*columns, divergence="kl", clip_low=0.05, clip_high=0.02, ratio_cap=2.0),
        lambda x, old, advantage: published.verl_dppo(x, old, advantage, "kl", 0.05, 0.02, 2.0),
    ),
    "sapo": (
        lambda *columns: sapo_loss(*columns, tau_positive=1.0, tau_negative=1.0625),
        lambda x, old, advantage: published.verl_sapo(x, old, advantage, 1.0, 1.0625),
    ),
    "cispo": (
        lambda *columns: cispo_loss(*columns, clip_low=0.8, clip_high=0.27),
        lambda x, old, advantage: published.verl_cispo(x, old, advantage, 0.8, 0.27),
    ),
    "gpg": (
        lambda x_N, _, advantage_N, mask_N: reinforce_loss(x_N, advantage_N, mask_N),
        lambda x, _, advantage: -x * advantage,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@given(step=steps())
@TRIES
def test_losses_of_single_tokens_equal_those_of_verl(name: str, step: Step) -> None:
    ours, theirs = LOSSES[name]
    old_BT = step.row("old")
    advantage_BT = step.row("advantage")
    assert_same_loss(
        lambda x_N: ours(x_N, step["old"], step["advantage"], step.mask_N).loss_N,
        lambda x_BT: theirs(x_BT, old_BT, advantage_BT),
        step,
    )


@given(steps())
@TRIES
def test_gspo_equals_that_of_verl(step: Step) -> None:
    rows = (step.row("old"), step.row("advantage"), step.mask)
    assert_same_loss(
        lambda x_N: (
            gspo_loss(
                *(x_N, step["old"], step["advantage"], step.mask_N, step.lengths), clip_low=0.2, clip_high=0.27
            ).loss_N
        ),
        lambda x_BT: published.verl_gspo(x_BT, *rows, 0.2, 0.27),
        step,
    )


@given(steps())
@TRIES
def test_geo_mean_without_advantages_of_0_equals_that_of_verl(step: Step) -> None:
    advantage_N = torch.where(step["advantage"] == 0, 0.25, step["advantage"])
    rows = (step.row("old"), step.padded(advantage_N), step.mask)
    assert_same_loss(
        lambda x_N: (
            geo_mean_loss(
                *(x_N, step["old"], advantage_N, step.mask_N, step.lengths), clip_low=0.3, clip_high=0.4
            ).loss_N
        ),
        lambda x_BT: published.verl_geo_mean(x_BT, *rows, 0.3, 0.4)[:, None].expand_as(x_BT),
        step,
    )


@given(steps(), st.sampled_from([0.0002, 0.1, 0.5]), st.integers(0, 99))
@TRIES
def test_clip_cov_and_its_dropped_tokens_equal_those_of_verl(step: Step, share: float, seed: int) -> None:
    # Before the first update the policy equals the old one, nothing is clipped, and the micro-batch is the whole step.
    covariance_N = covariances(step["old"], step["advantage"], step.mask_N)
    theirs_BT = published.verl_covariances(step.row("old"), step.row("advantage"), step.mask)
    assert_same(covariance_N[step.mask_N], step.flat(theirs_BT)[step.mask_N])
    candidates_N = step.flat((theirs_BT > 0.1) & (theirs_BT < 1.0))
    uniform_N = torch.rand(len(covariance_N), generator=torch.Generator().manual_seed(seed))
    dropped_N = clip_cov_tokens(covariance_N, step.mask_N, uniform_N, share=share, low=0.1, high=1.0)
    assert not (dropped_N & ~candidates_N).any()
    assert dropped_N.sum() == min(published.verl_count(share, step.mask), int(candidates_N.sum()))
    old_BT = step.row("old")
    advantage_BT = step.row("advantage")
    kept_BT = 1 - step.padded(dropped_N)

    def theirs(x_BT: Tensor) -> Tensor:
        return published.surrogate(published.token_ratio(x_BT, old_BT), advantage_BT, 0.2, 0.27) * kept_BT

    def ours(x_N: Tensor) -> Tensor:
        columns = (x_N, step["old"], step["advantage"], step.mask_N, dropped_N)
        return clip_cov_loss(*columns, clip_low=0.2, clip_high=0.27).loss_N

    assert_same_loss(ours, theirs, step)


@given(steps(), st.sampled_from([0.0002, 0.1, 0.5]))
@TRIES
def test_kl_cov_and_its_penalised_tokens_equal_those_of_verl(step: Step, share: float) -> None:
    covariance_N = covariances(step["old"], step["advantage"], step.mask_N)
    held_N = kl_cov_tokens(covariance_N, step.mask_N, share=share)
    old_BT = step.row("old")
    advantage_BT = step.row("advantage")
    theirs_N = step.flat(published.verl_covariances(old_BT, advantage_BT, step.mask))
    count = published.verl_count(share, step.mask)
    # Tokens with equal covariances may be exchanged.
    assert_same(theirs_N[held_N].sort().values, theirs_N.topk(count).values.sort().values)
    held_BT = step.padded(held_N)

    def theirs(x_BT: Tensor) -> Tensor:
        return -advantage_BT * published.token_ratio(x_BT, old_BT) + 0.5 * (x_BT - old_BT).abs() * held_BT

    def ours(x_N: Tensor) -> Tensor:
        return kl_cov_loss(x_N, step["old"], step["advantage"], step.mask_N, held_N, coef=0.5).loss_N

    assert_same_loss(ours, theirs, step)


@given(steps())
@TRIES
def test_aggregations_equal_those_of_verl(step: Step) -> None:
    x_BT = step.row("value")
    names: tuple[Aggregation, ...] = (
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
    )
    for name in names:
        ours = aggregate(step["value"], step.mask_N, step.lengths, Totals(64, 16), name, max_length=20)
        assert_same(ours, published.verl_agg(x_BT, step.mask, name, 64, 16, 20))
    # verl's fifth aggregation, the sum over tokens, equals the mean in a step that counts as one token.
    ours = aggregate(step["value"], step.mask_N, step.lengths, Totals(1, 1))
    assert_same(ours, published.verl_agg(x_BT, step.mask, "token-sum", 64, 16, 20))


@pytest.mark.parametrize("level", ["token", "sequence"])
@given(step=steps())
@TRIES
def test_importance_weights_equal_those_of_verl(level: Level, step: Step) -> None:
    columns = (step["old"], step["other"], step.mask_N, step.lengths)
    old_BT = step.row("old")
    other_BT = step.row("other")
    truncated_N = importance_weights(*columns, level=level, low=0.0, high=2.0, outside="clamp")
    assert_same_tokens(truncated_N, published.verl_is(old_BT - other_BT, step.mask, level, 2.0), step)
    icepop_N = importance_weights(*columns, level=level, low=0.5, high=5.0, outside="zero")
    assert_same_tokens(icepop_N, published.verl_is(old_BT - other_BT, step.mask, level, 5.0, 0.5), step)


LEVELS: dict[str, Level] = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}


@pytest.mark.parametrize(("prefix", "kind"), list(product(LEVELS, ("k1", "k2", "k3"))))
@given(step=steps())
@TRIES
def test_rejections_equal_those_of_verl(prefix: str, kind: Estimator, step: Step) -> None:
    old_BT = step.row("old")
    other_BT = step.row("other")
    columns = (step["old"], step["other"], step.mask_N, step.lengths)
    low, high = (0.625, 1.375) if kind == "k1" else (None, 0.17)
    if prefix == "seq_sum" and kind != "k1":
        high = 1.9
    ours_N = rejection_weights(*columns, level=LEVELS[prefix], estimator=kind, low=low, high=high)
    # verl's k1 is -d, so it bounds q / p instead of p / q.
    bounds = (high,) if low is None else (1 / low, 1 / high)
    assert_same_tokens(ours_N, published.verl_rs(old_BT - other_BT, step.mask, f"{prefix}_{kind}", *bounds), step)


@given(steps(empty=False))
@TRIES
def test_mismatch_metrics_equal_those_of_verl_and_openrlhf(step: Step) -> None:
    old_BT = step.row("old")
    other_BT = step.row("other")
    d_BT = (old_BT - other_BT) / 16
    ours = mismatch_metrics(step["old"] / 16, step["other"] / 16, step.mask_N, step.lengths)
    theirs = published.verl_offpolicy(d_BT, step.mask)
    names = {"kl": "mismatch_kl", "k3_kl": "mismatch_k3", "chi2_token": "chi_square_token"}
    for their_name, name in {**names, "chi2_seq": "chi_square_sequence"}.items():
        assert ours[name] == pytest.approx(theirs[their_name], rel=1e-6, abs=1e-6)
    untruncated_BT = published.verl_is(d_BT, step.mask, "token", math.inf)
    share = published.verl_eff_sample_size(untruncated_BT, step.mask)
    assert ours["effective_sample_size"] == pytest.approx(share, rel=1e-6)

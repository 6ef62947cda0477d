"""With matching options our functions equal those of OpenRLHF, and those of verl up to the advantages, to 1e-6.

Legend: B sequences; T tokens of the longest; N tokens end to end. The formulas of both systems are in `published`.
verl's losses and corrections are compared in `test_published_losses`, intended differences in
`test_published_differences`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.rl.advantages import group_mean_baseline, group_norm, rloo
from components.rl.aggregation import Aggregation, TokenLoss, Totals, aggregate, reduce_loss
from components.rl.correction import importance_weights, rejection_weights
from components.rl.group_advantages import gdpo, gpg, grpo_passk, opo
from components.rl.group_filter import groups_within
from components.rl.kl import KLKind, adapted_kl_coef, kl_estimate
from components.rl.masked import spread, token_mean
from components.rl.policy_losses import gspo_loss, ppo_loss
from components.rl.returns import discounted_returns, gae, remax, whiten
from components.rl.rewards import overlong_penalty
from components.rl.token_rewards import stop_properly_penalty, token_rewards
from components.rl.value_losses import clipped_value_loss
from tests.components.rl import published
from tests.components.rl.published import (
    Step,
    assert_same,
    assert_same_gradients,
    assert_same_loss,
    assert_same_tokens,
    steps,
)

TRIES = settings(max_examples=25, deadline=None)
Discounts = tuple[float, float]
FAR = 16.0
"""Maximum relative difference of whitened tokens: verl adds 1e-8 to their variance, whereas 1e-8 is the minimum
variance here and in OpenRLHF. For variances above 1/200 the results agree to 1e-6.
"""
# All inputs are exact in float32.
discounts = st.sampled_from([(1.0, 1.0), (1.0, 0.9375), (0.875, 0.75), (0.5, 0.0)])


# OpenRLHF.

SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rloo": rloo,
    "reinforce_baseline": group_mean_baseline,
    "dr_grpo": group_mean_baseline,
    "group_norm": partial(group_norm, epsilon=1e-9),
}


@pytest.mark.parametrize("estimator", SHAPES)
@given(prompts=st.integers(1, 6), responses=st.integers(2, 5), seed=st.integers(0, 999))
@TRIES
def test_shaped_and_clipped_rewards_equal_those_of_openrlhf(
    estimator: str, prompts: int, responses: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward_PG = torch.randint(-64, 65, (prompts, responses), generator=generator) / 64
    group_B = torch.arange(len(reward_PG)).repeat_interleave(reward_PG.shape[1])
    ours_B = SHAPES[estimator](reward_PG.flatten(), group_B).clamp(-0.75, 1.25)
    assert_same(ours_B, published.openrlhf_shaped(reward_PG.double(), estimator, -0.75, 1.25).flatten())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@given(step=steps())
@TRIES
def test_the_kl_penalty_of_rewards_equals_that_of_openrlhf(kind: KLKind, step: Step) -> None:
    kl_N = kl_estimate(step["x"], step["old"], step.mask_N, kind)
    # OpenRLHF sets log-probabilities outside the mask to 0 before this function.
    x_BT, old_BT = (step.row(name) * step.mask for name in ("x", "old"))
    kl_BT = published.openrlhf_kl(x_BT, old_BT, kind)
    assert_same_tokens(kl_N, kl_BT, step)
    ours_N = token_rewards(step.reward_B, kl_N, 0.125, step.mask_N, step.lengths)
    theirs_BT = published.openrlhf_token_rewards(step.reward_B.double(), kl_BT, 0.125, step.mask)
    assert_same_tokens(ours_N, theirs_BT, step)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@given(far=st.integers(-30 * 64, 30 * 64).map(lambda n: n / 64))
@TRIES
def test_kl_estimates_are_clipped_at_the_bound_of_openrlhf(kind: KLKind, far: float) -> None:
    x_N = torch.tensor([far], requires_grad=True)
    kl_N = kl_estimate(x_N, torch.zeros(1), torch.tensor([True]), kind)
    x = torch.tensor([far], dtype=torch.float64, requires_grad=True)
    kl = published.openrlhf_kl(x, torch.zeros(1, dtype=torch.float64), kind)
    assert_same(kl_N, kl)
    for out in (kl_N, kl):
        out.sum().backward()
    assert x_N.grad is not None
    assert x.grad is not None
    assert_same(x_N.grad, x.grad, 1e-5)


@given(steps(gaps=False), discounts, st.booleans())
@TRIES
def test_gae_of_single_turns_equals_that_of_openrlhf(step: Step, discount: Discounts, no_std_norm: bool) -> None:
    ours_N, return_N = gae(step["reward"], step["value"], step.mask_N, step.lengths, *discount)
    theirs_BT, return_BT = published.openrlhf_gae(step.row("reward"), step.row("value"), step.mask, *discount)
    assert_same_tokens(return_N, return_BT, step)
    ours_N = whiten(ours_N, step.mask_N, scale=not no_std_norm)
    assert_same_tokens(ours_N, published.openrlhf_whiten(theirs_BT, step.mask, no_std_norm), step)


@given(st.tuples(steps(), st.just(1.0)) | st.tuples(steps(gaps=False), st.sampled_from([0.5, 0.875])))
@TRIES
def test_returns_of_single_turns_equal_those_of_openrlhf(case: tuple[Step, float]) -> None:
    step, gamma = case
    ours_N = discounted_returns(step["reward"], step.mask_N, step.lengths, gamma)
    theirs_BT = published.openrlhf_returns(step.row("reward"), step.mask, gamma)
    assert_same_tokens(ours_N, theirs_BT, step)
    assert_same_tokens(whiten(ours_N, step.mask_N), published.openrlhf_whiten(theirs_BT, step.mask, False), step)


@given(*[st.floats(0.0, 2.0)] * 2, st.floats(0.01, 1.0), st.integers(100, 10_000), st.integers(0, 400))
@TRIES
def test_the_adaptive_kl_coefficient_equals_that_of_openrlhf_and_verl(
    coef: float, kl: float, target: float, horizon: int, samples: int
) -> None:
    ours = adapted_kl_coef(coef, kl, target=target, horizon=horizon, samples=samples)
    assert ours == pytest.approx(published.adaptive_kl(coef, kl, target, horizon, samples), rel=1e-6)


@given(steps(), st.sampled_from([None, 1.5, 3.0]))
@TRIES
def test_the_ppo_loss_equals_that_of_openrlhf_and_verl(step: Step, dual: float | None) -> None:
    old_BT = step.row("old")
    advantage_BT = step.row("advantage")

    def ours(x_N: Tensor) -> TokenLoss:
        clip: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.27, "dual_clip": dual}
        return ppo_loss(x_N, step["old"], step["advantage"], step.mask_N, **clip)

    def theirs(x_BT: Tensor) -> Tensor:
        return published.surrogate(published.token_ratio(x_BT, old_BT), advantage_BT, 0.2, 0.27, dual)

    assert_same_loss(lambda x_N: ours(x_N).loss_N, theirs, step)
    # ppo_clip_ratio in OpenRLHF: the share of tokens with surr2 < surr1.
    ratio_BT = published.token_ratio(step.row("x"), old_BT)
    clipped_BT = (ratio_BT.clamp(0.8, 1.27) * advantage_BT < ratio_BT * advantage_BT).double()
    share = token_mean(ours(step["x"]).metrics["clip_frac"], step.mask_N, 64)
    assert_same(share, (clipped_BT * step.mask).sum() / 64)


@given(steps())
@TRIES
def test_gspo_with_one_advantage_per_response_equals_that_of_openrlhf(step: Step) -> None:
    size = len(step.mask_N)
    advantage_N = spread(step.reward_B, step.lengths, size)
    old_BT = step.row("old")
    totals = Totals(tokens=64, sequences=16)
    x_N = step["x"].clone().requires_grad_()
    x_BT = step.row("x").requires_grad_()
    tokens = gspo_loss(x_N, step["old"], advantage_N, step.mask_N, step.lengths, clip_low=0.2, clip_high=0.27)
    ours = reduce_loss(tokens, step.mask_N, step.lengths, totals, "seq-mean-token-mean").loss
    ratio_BT = published.openrlhf_gspo_ratio(x_BT, old_BT, step.mask)
    loss_BT = published.surrogate(ratio_BT, step.reward_B.double()[:, None], 0.2, 0.27)
    theirs = published.openrlhf_aggregate(loss_BT, step.mask, "sequence", 64, 16)
    assert_same(ours, theirs)
    ours.backward()
    theirs.backward()
    assert_same_gradients(x_N, x_BT, step)


@pytest.mark.parametrize("kind", ["tis", "icepop"])
@pytest.mark.parametrize("bounds", [(0.5, 5.0), (0.75, 1.5)])
@given(step=steps())
@TRIES
def test_the_rollout_correction_equals_that_of_openrlhf(kind: str, bounds: Discounts, step: Step) -> None:
    low, high = bounds
    weight_N = importance_weights(
        *(step["old"], step["other"], step.mask_N, step.lengths),
        level="token",
        low=low,
        high=high,
        outside="clamp" if kind == "tis" else "zero",
    )
    weight_BT = published.openrlhf_correction(step.row("old"), step.row("other"), step.mask, kind, low, high)
    assert_same_tokens(weight_N, weight_BT, step)
    # Rejected tokens stay in the count by which the loss is divided.
    ours = reduce_loss(TokenLoss(step["value"]), step.mask_N, step.lengths, Totals(64, 16), weight_N=weight_N).loss
    loss_BT = step.row("value") * weight_BT
    assert_same(ours, published.openrlhf_aggregate(loss_BT, step.mask, "token", 64, 16))


@pytest.mark.parametrize("bounds", [(0.5, 5.0), (0.75, 1.5)])
@given(step=steps())
@TRIES
def test_masked_sequences_equal_those_of_openrlhf_and_their_weights_are_clamped(bounds: Discounts, step: Step) -> None:
    columns = (step["old"], step["other"], step.mask_N, step.lengths)
    low, high = bounds
    rows = (step.row("old"), step.row("other"), step.mask)
    kept_N = rejection_weights(*columns, level="geometric", estimator="k1", low=low, high=high)
    theirs_BT = published.openrlhf_correction(*rows, "seq-mask-tis", low, high)
    unclamped_N = importance_weights(*columns, level="token", low=0.0, high=math.inf, outside="clamp")
    assert_same_tokens(kept_N * unclamped_N, theirs_BT, step)
    clamped_N = importance_weights(*columns, level="token", low=low, high=high, outside="clamp")
    as_promised_BT = published.openrlhf_correction(*rows, "tis", low, high) * (theirs_BT > 0)
    assert_same_tokens(kept_N * clamped_N, as_promised_BT, step)


@given(steps())
@TRIES
def test_aggregation_equals_that_of_openrlhf(step: Step) -> None:
    x_BT = step.row("value")
    modes: dict[Aggregation, str] = {"token-mean": "token", "seq-mean-token-mean": "sequence"}
    for name, mode in modes.items():
        ours = aggregate(step["value"], step.mask_N, step.lengths, Totals(tokens=64, sequences=16), name)
        assert_same(ours, published.openrlhf_aggregate(x_BT, step.mask, mode, 64, 16))


@given(steps())
@TRIES
def test_the_value_loss_equals_that_of_openrlhf_and_verl(step: Step) -> None:
    old_BT = step.row("old_value")
    return_BT = step.row("return")
    clip = 0.296875

    def ours(x_N: Tensor) -> Tensor:
        return clipped_value_loss(x_N, step["old_value"], step["return"], step.mask_N, clip=clip).loss_N

    assert_same_loss(ours, lambda x_BT: published.openrlhf_value(x_BT, old_BT, return_BT, clip), step)


@given(
    st.lists(st.tuples(st.integers(-64, 64), st.integers(0, 300), st.booleans()), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.25, 1.0, -0.5, -2.0]),
)
@TRIES
def test_length_penalties_equal_those_of_openrlhf(responses: list[tuple[int, int, bool]], coef: float) -> None:
    rewards, lengths, truncated = zip(*responses, strict=True)
    reward_B = torch.tensor(rewards) / 64
    ours_B = overlong_penalty(reward_B, torch.tensor(lengths), 256, 64, 0.5)
    theirs = [published.openrlhf_overlong(n / 64, size, 256, 64, 0.5) for n, size, _ in responses]
    assert_same(ours_B, torch.tensor(theirs))
    ours_B = stop_properly_penalty(reward_B, torch.tensor(truncated), coef)
    assert_same(ours_B, torch.tensor([published.openrlhf_stop_properly(n / 64, cut, coef) for n, _, cut in responses]))


@given(steps(), st.sampled_from([(0.0, 1.0), (-0.25, 0.25), (0.5, 1.0)]))
@TRIES
def test_group_filtering_equals_that_of_openrlhf(step: Step, bounds: Discounts) -> None:
    score_B = (step.reward_B * 2).round().clamp(min=0) / 2  # 0, 1/2 and 1, so that means are equal to bounds
    low, high = bounds
    passes_B = published.each_group(
        score_B, step.group_B, lambda score, place: (low < score.mean() < high).expand(len(score)).float()
    )
    assert groups_within(score_B, step.group_B, low, high).tolist() == (passes_B > 0).tolist()


# verl.


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"])
@given(step=steps())
@TRIES
def test_kl_estimates_and_gradients_equal_those_of_verl(kind: KLKind, step: Step) -> None:
    ref_BT = step.row("old")
    assert_same_loss(
        lambda x_N: kl_estimate(x_N, step["old"], step.mask_N, kind),
        lambda x_BT: published.verl_kl(x_BT, ref_BT, kind),
        step,
    )


@given(steps(), discounts)
@TRIES
def test_gae_over_turns_equals_that_of_verl(step: Step, discount: Discounts) -> None:
    ours_N, return_N = gae(step["reward"], step["value"], step.mask_N, step.lengths, *discount)
    reward_BT = step.row("reward")
    value_BT = step.row("value")
    _, return_BT = published.verl_gae(reward_BT, value_BT, step.mask, *discount)
    assert_same_tokens(return_N, return_BT, step)
    theirs_BT, _ = published.verl_gae(FAR * reward_BT, FAR * value_BT, step.mask, *discount)
    assert_same_tokens(whiten(FAR * ours_N, step.mask_N, unbiased=True), theirs_BT, step)


@pytest.mark.parametrize("by_std", [True, False])
@given(step=steps(singletons=False))
@TRIES
def test_grpo_and_grpo_passk_equal_those_of_verl(by_std: bool, step: Step) -> None:
    reward_B = step.reward_B.double()
    group_B = step.group_B
    ours_B = group_norm(step.reward_B, group_B, 1e-6) if by_std else group_mean_baseline(step.reward_B, group_B)
    assert_same(ours_B, published.verl_grpo(reward_B, group_B, by_std))
    ours_B = grpo_passk(step.reward_B, group_B, divide_by_std=by_std)
    assert_same(ours_B, published.verl_passk(reward_B, group_B, by_std))


@given(steps(singletons=False, empty=False))
@TRIES
def test_rloo_opo_and_gpg_equal_those_of_verl(step: Step) -> None:
    reward_B = step.reward_B.double()
    group_B = step.group_B
    length_B = step.mask.sum(1).long()
    assert_same(rloo(step.reward_B, group_B), published.verl_rloo(reward_B, group_B))
    assert_same(opo(step.reward_B, length_B, group_B), published.verl_opo(reward_B, length_B, group_B))
    # The counts agree if no reward is 0 and no group has equal rewards.
    reward_B = step.reward_B + torch.arange(len(group_B)) / 4096 + 2
    assert_same(gpg(reward_B, group_B, 0.75), published.verl_gpg(reward_B.double(), group_B, 0.75))


@given(steps(), st.sampled_from([0.5, 0.875, 1.0]))
@TRIES
def test_reinforce_pp_equals_that_of_verl(step: Step, gamma: float) -> None:
    return_N = discounted_returns(step["reward"], step.mask_N, step.lengths, gamma)
    theirs_BT, return_BT = published.verl_reinforce_pp(step.row("reward"), step.mask, gamma)
    assert_same_tokens(return_N, return_BT, step)
    assert_same_tokens(whiten(return_N, step.mask_N, unbiased=True), theirs_BT, step)


@given(steps(singletons=False))
@TRIES
def test_reinforce_pp_baseline_equals_that_of_verl(step: Step) -> None:
    reward_B = FAR * step.reward_B
    centred_B = group_mean_baseline(reward_B, step.group_B)
    ours_N = whiten(spread(centred_B, step.lengths, len(step.mask_N)), step.mask_N, unbiased=True)
    theirs_BT = published.verl_reinforce_pp_baseline(reward_B.double(), step.group_B, step.mask)
    assert_same_tokens(ours_N, theirs_BT, step)


@given(steps())
@TRIES
def test_remax_equals_that_of_verl(step: Step) -> None:
    advantage_N, return_N = remax(step["reward"], step.reward_B, step.mask_N, step.lengths)
    theirs_BT, return_BT = published.verl_remax(step.row("reward"), step.reward_B.double(), step.mask)
    assert_same_tokens(advantage_N, theirs_BT, step)
    assert_same_tokens(return_N, return_BT, step)


@given(steps(singletons=False, empty=False))
@TRIES
def test_gdpo_equals_that_of_verl_except_for_whitening(step: Step) -> None:
    reward_BK = torch.stack([step.reward_B, step.reward_B.flip(0) / 2, step.reward_B.square()], dim=1)
    weights = [FAR, FAR / 2, -FAR / 4]
    theirs_BT = published.verl_gdpo(reward_BK.double(), step.group_B, weights, step.mask)
    ours_B = gdpo(reward_BK, step.group_B, torch.tensor(weights))
    ours_N = whiten(spread(ours_B, step.lengths, len(step.mask_N)), step.mask_N, unbiased=True)
    assert_same_tokens(ours_N, theirs_BT, step)

"""Intended differences between our functions and those of OpenRLHF and verl: both numbers in a small case.

The formulas of both systems are in `published`. All other functions are equal, as `test_published` checks.
"""

import math

import pytest
import torch
from torch import Tensor

from components.rl.advantages import group_mean_baseline, group_norm, rloo
from components.rl.aggregation import TokenLoss, Totals, aggregate, reduce_loss
from components.rl.correction import importance_weights, rejection_weights
from components.rl.covariance_losses import covariances, kl_cov_tokens
from components.rl.group_advantages import gdpo, gpg, grpo_passk, opo
from components.rl.kl import KLKind, adapted_kl_coef, kl_estimate
from components.rl.masked import token_mean
from components.rl.mismatch import mismatch_metrics
from components.rl.policy_losses import gspo_loss
from components.rl.ratio_losses import geo_mean_loss
from components.rl.returns import discounted_returns, gae, whiten
from tests.components.rl import published


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


ALL = torch.ones(1, 4, dtype=torch.float64)
FOUR = torch.tensor([4])
ACTS = torch.tensor([True] * 4)


def test_gae_skips_environment_tokens_unlike_openrlhf_and_verl() -> None:
    mask = row(1, 1, 0, 0, 1, 1)
    reward = row(0, 0, 0, 0, 0, 1)
    value = row(0.1, 0.2, 0, 0, 0.3, 0.4)
    ours_N, return_N = gae(
        *(reward.flatten(), value.flatten(), mask.flatten().bool(), torch.tensor([6])), gamma=1.0, lambd=0.95
    )
    # The deltas are .1, .1, .1, .6 over the action tokens, and .1, -.2, 0, .3, .1, .6 over all tokens.
    assert ours_N.tolist() == pytest.approx([0.7997, 0.7365, 0, 0, 0.67, 0.6], abs=5e-5)
    theirs, _ = published.openrlhf_gae(reward, value, mask, 1.0, 0.95)
    assert theirs[0, :2].tolist() == pytest.approx([0.7129, 0.6452], abs=5e-5)
    # verl carries its last value over the gap: the return there is .67, and the whitened advantages are not 0.
    whitened, returns = published.verl_gae(reward, value, mask, 1.0, 0.95)
    assert returns[0, 2:4].tolist() == pytest.approx([0.67, 0.67])
    assert whitened[0, 2:4].abs().min() > 0.1
    assert return_N[2:4].tolist() == [0.0, 0.0]


def test_returns_skip_environment_tokens_unlike_openrlhf() -> None:
    mask = row(1, 0, 0, 1)
    reward = row(0, 0, 0, 1)
    ours_N = discounted_returns(reward.flatten(), mask.flatten().bool(), FOUR, 0.5)
    assert ours_N.tolist() == [0.5, 0, 0, 1]
    assert published.openrlhf_returns(reward, mask, 0.5).tolist() == [[0.125, 0.25, 0.5, 1]]


def test_a_group_of_one_has_advantage_0_and_in_verl_its_reward_or_an_error() -> None:
    reward_B = column(0.75)
    group_B = torch.tensor([3])
    length_B = torch.tensor([2])
    wide_B = reward_B.double()
    assert published.verl_grpo(wide_B, group_B, by_std=True).tolist() == pytest.approx([0.75], abs=1e-6)
    for theirs in (
        published.verl_grpo(wide_B, group_B, by_std=False),
        published.verl_rloo(wide_B, group_B),
        published.verl_opo(wide_B, length_B, group_B),
        published.verl_gpg(wide_B, group_B, 1.0),
    ):
        assert theirs.tolist() == [0.75]
    with pytest.raises(ValueError, match="second best"):
        published.verl_passk(wide_B, group_B, by_std=True)
    for ours in (group_norm, group_mean_baseline, rloo, gpg, grpo_passk):
        assert ours(reward_B, group_B).tolist() == [0.0]
    assert opo(reward_B, length_B, group_B).tolist() == [0.0]


def test_equal_rewards_give_exactly_0_and_with_float32_sums_a_remainder() -> None:
    reward_B = torch.full((3,), 0.9)
    theirs = published.openrlhf_shaped(reward_B[None], "group_norm", -10, 10)
    assert theirs.abs().min() > 0.5
    assert group_norm(reward_B, torch.zeros(3, dtype=torch.int64)).tolist() == [0.0] * 3


def test_whitening_has_the_variance_of_openrlhf_by_default_and_accepts_one_token() -> None:
    # 1 and 3: the mean is 2, the variance is 1 (divided by n) or 2 (divided by n - 1).
    x = row(1, 3)
    mask = row(1, 1)
    both = torch.tensor([True, True])
    assert whiten(x.flatten(), both).tolist() == [-1.0, 1.0]
    assert published.openrlhf_whiten(x, mask, no_std_norm=False).tolist() == [[-1.0, 1.0]]
    root = math.sqrt(0.5)
    assert whiten(x.flatten(), both, unbiased=True).tolist() == pytest.approx([-root, root])
    assert published.verl_whiten(x, mask)[0].tolist() == pytest.approx([-root, root])
    with pytest.raises(ValueError, match="fewer than two"):
        published.verl_whiten(x, row(0, 1))
    assert whiten(x.flatten(), torch.tensor([False, True]), unbiased=True).tolist() == [0.0, 0.0]


def test_dr_grpo_divides_by_max_length_unlike_openrlhf_and_verl() -> None:
    # Sums 2 and 4 of two sequences of 1 and 4 tokens. The maximum length of a response is 8.
    mask = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]]).double()
    loss = torch.tensor([[2.0, 0, 0, 0], [1, 1, 1, 1]]).double()
    flat_N = column(2, 1, 1, 1, 1)
    acts_N = torch.ones(5).bool()
    lengths_B = torch.tensor([1, 4])
    totals = Totals(5, 2)
    ours = aggregate(flat_N, acts_N, lengths_B, totals, "seq-mean-token-sum-norm", max_length=8)
    assert ours.item() == 3 / 8
    assert published.verl_agg(loss, mask, "seq-mean-token-sum-norm", 5, 2, 8).item() == 3 / 8
    assert published.verl_agg(loss, mask, "seq-mean-token-sum-norm", 5, 2, None).item() == 3 / 4
    assert published.openrlhf_aggregate(loss, mask, "token", 5, 2).item() == pytest.approx(6 / 5)


def test_gpg_counts_responses_of_informative_groups_and_verl_nonzero_rewards() -> None:
    # Three groups of two: all correct, half correct, all wrong. Two responses are in an informative group, three have a
    # nonzero reward.
    reward_B = column(1, 1, 1, 0, 0, 0)
    group_B = torch.tensor([0, 0, 1, 1, 2, 2])
    assert gpg(reward_B, group_B).tolist() == [0, 0, 0.5 * 3, -0.5 * 3, 0, 0]
    assert published.verl_gpg(reward_B.double(), group_B, 1.0).tolist() == [0, 0, 0.5 * 2, -0.5 * 2, 0, 0]


def test_gdpo_whitens_over_responses_and_verl_over_tokens() -> None:
    # One reward, one group: 1 and 0 differ from their mean by sqrt(1/2) deviations. Whitened over responses they are 1
    # and -1. Whitened over tokens, three against one, with mean 1/2 and unbiased variance 1, they are 1/2 and -3/2.
    reward_BK = torch.tensor([[1.0], [0.0]])
    group_B = torch.tensor([4, 4])
    assert gdpo(reward_BK, group_B, column(1)).tolist() == pytest.approx([1, -1])
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]]).double()
    theirs = published.verl_gdpo(reward_BK.double(), group_B, [1.0], mask)
    assert theirs[:, 0].tolist() == pytest.approx([0.5, -1.5])


def test_geo_mean_weighs_responses_equally_and_verl_micro_batches() -> None:
    # Three responses of one token and ratio 1, with advantages 3, 0 and 2. The second has no action. The mean over
    # responses is -(3 + 2) / 2. In micro-batches of two and one, verl has means of -3 / 2 and -2, whose mean is -7 / 4.
    zeros = torch.zeros(3)
    advantage = column(3, 0, 2)
    lengths_B = torch.ones(3, dtype=torch.int64)
    acts = torch.tensor([True, False, True])
    tokens = geo_mean_loss(zeros, zeros, advantage, acts, lengths_B, clip_low=0.4, clip_high=0.4)
    assert reduce_loss(tokens, acts, lengths_B, Totals(2, 2), "seq-mean-token-mean").loss.item() == -2.5
    still, advantage_BT, mask = (x_N.double()[:, None] for x_N in (zeros, advantage, acts))
    theirs_B = published.verl_geo_mean(still, still, advantage_BT, mask, 0.4, 0.4)
    assert (theirs_B[:2].mean() + theirs_B[2:].mean()).item() / 2 == pytest.approx(-1.75)


def test_geo_mean_with_mixed_advantages_includes_tokens_of_advantage_0_unlike_verl() -> None:
    # d = 0.2 and 0.4 with advantages 2 and 0: the geometric mean is e^0.3. verl multiplies d by the sign of the
    # advantage, which is 0 for the second token, and gets e^0.1.
    both = torch.tensor([True, True])
    tokens = geo_mean_loss(
        *(column(-1.8, -1.6), column(-2, -2), column(2, 0), both, torch.tensor([2])), clip_low=0.5, clip_high=0.5
    )
    assert tokens.loss_N.tolist() == pytest.approx([-math.exp(0.3)] * 2)
    theirs = published.verl_geo_mean(row(-1.8, -1.6), row(-2, -2), row(2, 0), row(1, 1), 0.5, 0.5)
    assert theirs.item() == pytest.approx(-math.exp(0.1))


def test_covariances_are_computed_over_the_step_and_in_verl_over_a_micro_batch() -> None:
    old = (-1.0, -3.0, -5.0, -7.0)
    advantage = (1.0, 0.0, -1.0, 0.0)
    ours_N = covariances(column(*old), column(*advantage), ACTS)
    # The means are -4 and 0 over the step, and -2 and 1/2 over its first half.
    assert ours_N.tolist() == [3, 0, 1, 0]
    theirs = published.verl_covariances(row(*old[:2]), row(*advantage[:2]), row(1, 1))
    assert theirs[0].tolist() == pytest.approx([0.5, 0.5])
    # A quarter of all tokens is one token, and it is one token of each half as well.
    assert kl_cov_tokens(ours_N, ACTS, share=0.25).tolist() == [True, False, False, False]
    assert published.verl_count(0.25, row(1, 1)) == 1


def test_masked_sequences_have_clamped_weights_unlike_openrlhf() -> None:
    rollout = (-3.0, 3.0, 0.0, 0.0)
    columns = (torch.zeros(4), column(*rollout), ACTS, FOUR)
    kept_N = rejection_weights(*columns, level="geometric", estimator="k1", low=0.5, high=5.0)
    weight_N = kept_N * importance_weights(*columns, level="token", low=0.5, high=5.0, outside="clamp")
    # Weights 5, 1/2, 1, 1 here, and e^3, e^-3, 1, 1 in OpenRLHF. Each token has a loss of -1.
    ours = reduce_loss(TokenLoss(-torch.ones(4)), ACTS, FOUR, Totals(4, 1), weight_N=weight_N).loss
    assert ours.item() == pytest.approx(-1.875)
    theirs = published.openrlhf_correction(torch.zeros_like(ALL), row(*rollout), ALL, "seq-mask-tis", 0.5, 5.0)
    assert published.openrlhf_aggregate(-theirs, ALL, "token", 4, 1).item() == pytest.approx(-5.534, abs=5e-4)


def test_rejected_tokens_stay_in_the_token_count_unlike_verl() -> None:
    # d = 0, 0, 0, log 4 with a loss of 1 each. Three of four tokens are kept.
    d = (0.0, 0.0, 0.0, math.log(4))
    kept_N = rejection_weights(
        *(column(*d), torch.zeros(4), ACTS, FOUR), level="token", estimator="k2", low=None, high=0.5
    )
    assert reduce_loss(TokenLoss(torch.ones(4)), ACTS, FOUR, Totals(4, 1), weight_N=kept_N).loss.item() == 0.75
    left = published.verl_rs(row(*d), ALL, "token_k2", 0.5)
    assert published.verl_agg(ALL, left, "token-mean", int(left.sum()), 1, None).item() == 1.0


def test_rejection_by_k1_bounds_p_over_q_and_verl_q_over_p() -> None:
    # p / q = 3 and 1 / 3, bounds 1/2 and 4.
    d = (math.log(3), -math.log(3))
    both = torch.tensor([True, True])
    two = torch.tensor([2])
    ours_N = rejection_weights(
        *(column(*d), torch.zeros(2), both, two), level="token", estimator="k1", low=0.5, high=4.0
    )
    assert ours_N.tolist() == [1, 0]
    assert published.verl_rs(row(*d), row(1, 1), "token_k1", 4.0, 0.5).tolist() == [[0, 1]]


def test_the_effective_sample_size_uses_ratios_and_in_verl_truncated_weights() -> None:
    # w = 1, 1, 1, 5: 64 / (4 * 28). Truncated to 2: 25 / (4 * 7).
    d = (0.0, 0.0, 0.0, math.log(5))
    ours = mismatch_metrics(column(*d), torch.zeros(4), ACTS, FOUR, high=2.0)
    assert ours["effective_sample_size"] == pytest.approx(64 / 112)
    weights = published.verl_is(row(*d), ALL, "token", 2.0)
    assert published.verl_eff_sample_size(weights, ALL) == pytest.approx(25 / 28)


def test_sequences_without_an_action_are_not_counted() -> None:
    # One sequence has action tokens with a mean of 3, the other has none. OpenRLHF omits the second one from the sum
    # but counts both.
    flat_N = column(3, 3, 9)
    acts_N = torch.tensor([True, True, False])
    lengths_B = torch.tensor([2, 1])
    loss = torch.tensor([[3.0, 3], [9, 0]]).double()
    mask = torch.tensor([[1.0, 1], [0, 0]]).double()
    assert aggregate(flat_N, acts_N, lengths_B, Totals(2, 1), "seq-mean-token-mean").item() == 3.0
    assert published.openrlhf_aggregate(loss, mask, "sequence", 2, 2).item() == pytest.approx(1.5)
    # verl computes the chi-square over sequences: (2^2 + 1) / 2 - 1, and not 2^2 - 1.
    d_N = column(math.log(2), 0, 9)
    ours = mismatch_metrics(d_N, torch.zeros(3), acts_N, lengths_B)
    assert ours["chi_square_sequence"] == pytest.approx(3)
    theirs = published.verl_offpolicy(torch.tensor([[math.log(2), 0], [0, 0]]).double(), mask)
    assert theirs["chi2_seq"] == pytest.approx(1.5)


@pytest.mark.parametrize(("kind", "expected"), [("k1", 12.0), ("abs", 12.0), ("k2", 72.0)])
def test_every_kl_estimate_is_clipped_and_in_verl_only_k3(kind: KLKind, expected: float) -> None:
    x_N = column(12)
    one = torch.tensor([True])
    assert kl_estimate(x_N, torch.zeros(1), one, kind).item() == 10.0
    assert published.verl_kl(x_N.double(), torch.zeros(1), kind).item() == expected
    assert published.verl_kl(-x_N.double(), torch.zeros(1), "k3").item() == 10.0


def test_a_nan_is_kept_and_in_verl_its_token_is_excluded() -> None:
    columns = (column(math.nan, 0, 0, 0), torch.zeros(4), ACTS, FOUR)
    d = row(math.nan, 0, 0, 0)
    ours_N = importance_weights(*columns, level="token", low=0.5, high=2.0, outside="zero")
    assert ours_N.tolist() == pytest.approx([math.nan, 1, 1, 1], nan_ok=True)
    assert published.verl_is(d, ALL, "token", 2.0, 0.5).tolist() == [[0, 1, 1, 1]]
    ours_N = rejection_weights(*columns, level="token", estimator="k2", low=None, high=2.0)
    assert ours_N.tolist() == pytest.approx([math.nan, 1, 1, 1], nan_ok=True)
    assert published.verl_rs(d, ALL, "token_k2", 2.0).tolist() == [[0, 1, 1, 1]]


def test_the_adaptive_kl_is_a_mean_over_tokens_and_in_verl_over_sequences() -> None:
    # 3 tokens of .1 and one of .5: the mean over tokens is .2, over sequences (.1 + .5) / 2. The target is .25.
    kl_N = column(0.1, 0.1, 0.1, 0.5)
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]]).double()
    kl = token_mean(kl_N, ACTS, 4).item()
    assert adapted_kl_coef(1.0, kl, target=0.25, horizon=10, samples=2) == pytest.approx(1 - 0.2 * 0.2)
    kl = published.verl_agg(
        torch.tensor([[0.1, 0.1, 0.1], [0.5, 0, 0]]), mask, "seq-mean-token-mean", 4, 2, None
    ).item()
    assert published.adaptive_kl(1.0, kl, 0.25, 10, 2) == pytest.approx(1 + 0.2 * 0.2)


def test_gspo_clips_ratios_at_e_20_and_verl_at_e_10() -> None:
    one = torch.tensor([True])
    length = torch.tensor([1])
    ours = gspo_loss(column(-1), column(-13), column(-1), one, length, clip_low=0.2, clip_high=0.2).loss_N
    assert ours.item() == pytest.approx(math.exp(12))
    theirs = published.verl_gspo(row(-1), row(-13), row(-1), row(1), 0.2, 0.2)
    assert theirs.item() == pytest.approx(math.exp(10))


def test_gspo_has_gradients_per_token_and_in_openrlhf_per_response() -> None:
    # Ratio 1, advantages 3 and 1: gradients of -3/2 and -1/2 for a mean over two tokens. Shared over the response they
    # are -1 and -1. The losses are equal.
    both = torch.tensor([True, True])
    two = torch.tensor([2])
    x_N = torch.zeros(2, requires_grad=True)
    x = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    tokens = gspo_loss(x_N, torch.zeros(2), column(3, 1), both, two, clip_low=0.2, clip_high=0.2)
    ours = reduce_loss(tokens, both, two, Totals(2, 1), "seq-mean-token-mean").loss
    ratio = published.openrlhf_gspo_ratio(x, row(0, 0), row(1, 1))
    loss = published.surrogate(ratio, row(3, 1), 0.2, 0.2)
    theirs = published.openrlhf_aggregate(loss, row(1, 1), "sequence", 2, 1)
    assert ours.item() == pytest.approx(-2)
    assert theirs.item() == pytest.approx(-2)
    ours.backward()
    theirs.backward()
    assert x_N.grad is not None
    assert x.grad is not None
    assert x_N.grad.tolist() == [-1.5, -0.5]
    assert x.grad[0].tolist() == pytest.approx([-1, -1])

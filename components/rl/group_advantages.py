"""Further advantages of responses over the others to the same prompt: OPO, GPG, GRPO for pass@k, and GDPO.

B responses. Each turns rewards [B] into rewards [B], as those of `advantages` do. `gpg` and `gdpo` need all of a step's
responses at once: given a rank's share they compute something else.
"""

import math

import torch
from torch import Tensor

from components.rl.advantages import Groups
from components.rl.masked import (
    check_sequences,
)
from components.rl.returns import whiten


def opo(reward_B: Tensor, length_B: Tensor, group_B: Tensor) -> Tensor:
    """Reward minus the mean of its group weighted by length, the baseline of least variance if long responses vary
    more.

    Source: Hao et al. 2025 (OPO, arXiv 2505.23585), equation 8: R_i - sum(l R) / sum(l) over the group.

    Args:
        reward_B: [B] reward of each response.
        length_B: [B] tokens that the policy produced.
        group_B: [B] integers, as in `group_mean_baseline`.

    Returns:
        [B] float32 without gradient. 0 for a response that is alone in its group. In a group without any token the
        baseline is the plain mean.
    """
    check_sequences(reward_B, length_B=length_B)
    groups = Groups(reward_B, group_B)
    length_B = length_B.double()
    # Around the plain mean, so that equal rewards leave exactly 0.
    shift_B = groups.sums(length_B * groups.centred_B) / groups.sums(length_B).clamp(min=1.0)
    return (groups.centred_B - shift_B).float()


def gpg(reward_B: Tensor, group_B: Tensor, scale: float = 1.0) -> Tensor:
    """Reward minus the mean of its group, times the responses there are over those in groups of unequal rewards, over
    scale.

    Source: Chu et al. 2025 (GPG, arXiv 2504.02546), equation 7: groups of equal rewards have no gradient, and the
    factor keeps them from diluting that of the others. verl counts the responses whose reward is not 0 instead, which
    depends on where the zero of the reward is.

    Args:
        reward_B: [B] reward of each of the step's responses.
        group_B: [B] integers, as in `group_mean_baseline`.
        scale: the paper's F_norm, 1 there; above 0.

    Returns:
        [B] float32 without gradient. 0 in a group whose rewards are all equal, as in a group of one.
    """
    if not scale > 0:
        raise ValueError(f"scale={scale}; set it above 0")
    groups = Groups(reward_B, group_B)
    telling = int((groups.std_B != 0).sum())
    return (groups.centred_B * (len(reward_B) / max(telling, 1) / scale)).float()


def grpo_passk(reward_B: Tensor, group_B: Tensor, divide_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """The best response of a group gets what it is ahead of the second best, over the group's deviation; the others 0.

    Source: Tang et al. 2025 (arXiv 2503.19595), the leave-one-out advantage of the maximum over a group, as pass@k
    rewards it; the division is GRPO's.

    Args:
        reward_B: [B] reward of each response.
        group_B: [B] integers, as in `group_mean_baseline`.
        divide_by_std: False leaves the difference as it is.
        epsilon: added to the deviation.

    Returns:
        [B] float32 without gradient. 0 everywhere in a group with two best responses, and in a group of one, which has
        no second best. (verl refuses groups of one.)
    """
    groups = Groups(reward_B, group_B)
    best_B = groups.largest(groups.centred_B)
    is_best_B = groups.centred_B == best_B
    second_B = groups.largest(torch.where(is_best_B, -math.inf, groups.centred_B))
    is_ahead_B = is_best_B & (groups.sums(is_best_B.double()) == 1) & (groups.size_B > 1)
    # Times 0 instead of 0, so that a NaN in the group stays one.
    lead_B = torch.where(is_ahead_B, best_B - second_B, 0.0 * groups.sums(groups.centred_B))
    return (lead_B / (groups.std_B + epsilon) if divide_by_std else lead_B).float()


def gdpo(reward_BK: Tensor, group_B: Tensor, weight_K: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Several rewards, each normalised within its group, then their weighted sum, whitened over the batch.

    Source: Liu et al. 2026 (GDPO, arXiv 2601.05242), equations 4 to 6: summed first, combinations of rewards that
    differ would come out the same. The last step is over responses, as in the paper; verl whitens over tokens, where a
    long response counts more.

    Args:
        reward_BK: [B, K] the K rewards of each of the step's responses.
        group_B: [B] integers, as in `group_mean_baseline`.
        weight_K: [K] weight of each reward.
        epsilon: added to each deviation, as in verl.

    Returns:
        [B] float32 without gradient. All 0 where every group is of one, or of equal rewards. One NaN makes all NaN.
    """
    if reward_BK.dim() != 2 or weight_K.shape != reward_BK.shape[1:]:
        raise ValueError(
            f"reward_BK has shape {list(reward_BK.shape)}, weight_K {list(weight_K.shape)}; give [B, K] and [K]"
        )
    # In float64, so that sums which are equal on paper are equal, and whitening makes nothing of their digits.
    total_B = torch.zeros(len(reward_BK), dtype=torch.float64, device=reward_BK.device)
    for reward_B, weight in zip(reward_BK.unbind(1), weight_K.tolist(), strict=True):
        groups = Groups(reward_B, group_B)
        total_B += weight * groups.centred_B / (groups.std_B + epsilon)
    return whiten(total_B.float(), torch.ones_like(total_B, dtype=torch.bool))

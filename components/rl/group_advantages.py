"""Further advantages of responses over the others to the same prompt: OPO, GPG, GRPO for pass@k, and GDPO.

B responses. Each turns rewards [B] into rewards [B], as those of `advantages` do. `gpg` and `gdpo` need all of a step's
responses at once: given a rank's share they compute something else.
"""

import math

import torch
from torch import Tensor

from components.rl.advantages import Groups
from components.rl.masked import check_sequences
from components.rl.returns import whiten


def opo(reward_B: Tensor, length_B: Tensor, group_B: Tensor) -> Tensor:
    """Reward minus the length-weighted mean reward of its group.

    This baseline has minimum variance if the gradient's variance grows with the length of the response.

    Source: Hao et al. 2025 (OPO, arXiv 2505.23585), equation 8: R_i - sum(l R) / sum(l) over the group.

    Args:
        reward_B: [B] reward of each response.
        length_B: [B] number of tokens that the policy produced.
        group_B: [B] integer ids, as in `group_mean_baseline`.

    Returns:
        [B] float32 without gradient. 0 for the only response in a group. In a group without any token the baseline is
        the unweighted mean.
    """
    check_sequences(reward_B, length_B=length_B)
    groups = Groups(reward_B, group_B)
    length_B = length_B.double()
    # Computed relative to the unweighted mean, so that equal rewards give exactly 0.
    shift_B = groups.sums(length_B * groups.centred_B) / groups.sums(length_B).clamp(min=1.0)
    return (groups.centred_B - shift_B).float()


def gpg(reward_B: Tensor, group_B: Tensor, scale: float = 1.0) -> Tensor:
    """Reward minus the mean reward of its group, times (responses / informative responses) / scale.

    Informative responses are those in groups whose rewards are not all equal.

    Source: Chu et al. 2025 (GPG, arXiv 2504.02546), equation 7. Groups of equal rewards have no gradient; the factor
    prevents them from diluting the gradient of the others. verl counts the responses with a non-zero reward instead,
    which depends on the offset of the reward.

    Args:
        reward_B: [B] reward of each response of the step.
        group_B: [B] integer ids, as in `group_mean_baseline`.
        scale: the paper's F_norm, above 0. The paper uses 1.

    Returns:
        [B] float32 without gradient. 0 in a group whose rewards are all equal, including a group of one.
    """
    if not scale > 0:
        raise ValueError(f"scale={scale}; set it above 0")
    groups = Groups(reward_B, group_B)
    informative = int((groups.std_B != 0).sum())
    return (groups.centred_B * (len(reward_B) / max(informative, 1) / scale)).float()


def grpo_passk(reward_B: Tensor, group_B: Tensor, divide_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Pass@k advantage: the best response gets its lead over the second best, all other responses get 0.

    Source: Tang et al. 2025 (arXiv 2503.19595), the leave-one-out advantage of the maximum over a group, which is the
    quantity that pass@k measures. The division by the group's standard deviation is GRPO's.

    Args:
        reward_B: [B] reward of each response.
        group_B: [B] integer ids, as in `group_mean_baseline`.
        divide_by_std: divide the lead by the group's standard deviation. False returns the lead itself.
        epsilon: added to the standard deviation.

    Returns:
        [B] float32 without gradient. 0 everywhere in a group whose maximum occurs twice, and in a group of one, which
        has no second best. (verl rejects groups of one.)
    """
    groups = Groups(reward_B, group_B)
    best_B = groups.largest(groups.centred_B)
    is_best_B = groups.centred_B == best_B
    second_B = groups.largest(torch.where(is_best_B, -math.inf, groups.centred_B))
    is_ahead_B = is_best_B & (groups.sums(is_best_B.double()) == 1) & (groups.size_B > 1)
    # 0.0 * x instead of 0.0: a NaN in the group stays NaN instead of becoming an advantage of 0.
    lead_B = torch.where(is_ahead_B, best_B - second_B, 0.0 * groups.sums(groups.centred_B))
    if divide_by_std:
        lead_B = lead_B / (groups.std_B + epsilon)
    return lead_B.float()


def gdpo(reward_BK: Tensor, group_B: Tensor, weight_K: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Normalise each of several rewards within its group, sum them with weights, and whiten the sum over the batch.

    Source: Liu et al. 2026 (GDPO, arXiv 2601.05242), equations 4 to 6. If rewards were summed before they are
    normalised, different combinations of rewards would get the same advantage. The whitening is over responses, as in
    the paper. verl whitens over tokens, which gives a long response more weight.

    Args:
        reward_BK: [B, K] the K rewards of each response of the step.
        group_B: [B] integer ids, as in `group_mean_baseline`.
        weight_K: [K] weight of each reward.
        epsilon: added to each standard deviation, as in verl.

    Returns:
        [B] float32 without gradient. All 0 if every group has a single response or equal rewards. A single NaN makes
        all of them NaN.
    """
    if reward_BK.dim() != 2 or weight_K.shape != reward_BK.shape[1:]:
        raise ValueError(f"reward_BK is {list(reward_BK.shape)}, weight_K {list(weight_K.shape)}; give [B, K] and [K]")
    # In float64: sums that are mathematically equal stay equal. Whitening would amplify a difference in the last digit.
    total_B = torch.zeros(len(reward_BK), dtype=torch.float64, device=reward_BK.device)
    for reward_B, weight in zip(reward_BK.unbind(1), weight_K.tolist(), strict=True):
        groups = Groups(reward_B, group_B)
        total_B += weight * groups.centred_B / (groups.std_B + epsilon)
    return whiten(total_B.float(), torch.ones_like(total_B, dtype=torch.bool))

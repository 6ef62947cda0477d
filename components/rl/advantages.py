"""Advantages of responses: how much better each was than the others to the same prompt.

B responses. `group_mean_baseline`, `rloo` and `group_norm` turn rewards [B] into rewards [B], which
`token_rewards.token_rewards` then puts on tokens. Dr. GRPO is `group_mean_baseline` with the aggregation
seq-mean-token-sum-norm. `returns` has the advantages of tokens, `group_advantages` further comparisons.
"""

import math

import torch
from torch import Tensor

from components.rl.masked import check_sequences


def group_mean_baseline(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Reward minus the mean reward of its group (the responses to one prompt).

    Source: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783), which is GRPO's advantage without the division by the
    standard deviation. Hu et al. 2025 (REINFORCE++-baseline, arXiv 2501.03262) use the same group mean.

    Args:
        reward_B: [B] reward of each response.
        group_B: [B] integer ids, equal for the responses to one prompt. Ids may be any integers in any order, and
            groups may differ in size.

    Returns:
        [B] float32 without gradient. 0 for the only response in a group.

    Raises:
        ValueError: shapes differ, or group_B is not of integers. The other group functions raise it too.
    """
    return Groups(reward_B, group_B).centred_B.float()


def rloo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Reward minus the mean of the other responses to the same prompt: R_i - (sum - R_i) / (n - 1).

    Source: Ahmadian et al. 2024 (RLOO, arXiv 2402.14740), after Kool et al. 2019.

    Args:
        reward_B: [B] reward of each response.
        group_B: [B] integer ids, as in `group_mean_baseline`.

    Returns:
        [B] float32 without gradient. 0 for the only response in a group. Its plain reward would be an advantage
        without a baseline, next to others that have one. (verl's rloo returns the plain reward, its rloo_vectorized
        returns 0.)
    """
    groups = Groups(reward_B, group_B)
    # R - (n mean - R) / (n - 1) = (R - mean) n / (n - 1). This form is exactly 0 for equal rewards.
    return (groups.centred_B * groups.size_B / (groups.size_B - 1).clamp(min=1)).float()


def group_norm(reward_B: Tensor, group_B: Tensor, epsilon: float = 1e-4) -> Tensor:
    """Reward normalised within its group: (R - mean) / (std + epsilon).

    Source: Shao et al. 2024 (GRPO, arXiv 2402.03300), section 4.1.2. The standard deviation is the unbiased one, as in
    OpenRLHF and verl.

    Args:
        reward_B: [B] reward of each response.
        group_B: [B] integer ids, as in `group_mean_baseline`.
        epsilon: added to the standard deviation. TRL uses 1e-4, verl 1e-6, OpenRLHF 1e-9. Two rewards of 1 that differ
            in the last digit of a float32 sum get an advantage of 0.0009, 0.08 or 1.5 respectively.

    Returns:
        [B] float32 without gradient. Exactly 0 in a group whose rewards are all equal, including a group of one. (verl
        returns the plain reward in a group of one.)
    """
    groups = Groups(reward_B, group_B)
    return (groups.centred_B / (groups.std_B + epsilon)).float()


def group_std(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Return the unbiased standard deviation [B] of the rewards in each response's group.

    It is exactly 0 where all rewards of a group are equal.
    """
    return Groups(reward_B, group_B).std_B.float()


class Groups:
    """Statistics of rewards within their groups, in float64.

    In float64 the sum of equal float32 numbers is exact, so their mean is exactly that number. In float32 the mean may
    differ in the last digit: a difference of 1e-8 divided by a standard deviation of 1e-8 would be an advantage of 1.

    Attributes:
        index_B: [B] index of each response's group, from 0.
        size_B: [B] number of responses in each response's group.
        mean_B: [B] mean reward of each response's group.
        centred_B: [B] reward minus `mean_B`.
    """

    def __init__(self, reward_B: Tensor, group_B: Tensor) -> None:
        check_sequences(reward_B, group_B=group_B)
        if group_B.is_floating_point() or group_B.dtype == torch.bool:
            raise ValueError(f"group_B is {group_B.dtype}; give each sequence the integer id of its prompt")
        _, self.index_B, count = torch.unique(group_B, return_inverse=True, return_counts=True)
        self.size_B = count[self.index_B]
        wide_B = reward_B.detach().float().double()
        self.mean_B = self.sums(wide_B) / self.size_B
        self.centred_B = wide_B - self.mean_B

    @property
    def std_B(self) -> Tensor:
        """Unbiased standard deviation [B] of each response's group; 0 in a group of one."""
        return (self.sums(self.centred_B.square()) / (self.size_B - 1).clamp(min=1)).sqrt()

    def sums(self, x_B: Tensor) -> Tensor:
        """Return the sum [B] of x over each response's group."""
        return torch.zeros_like(x_B).index_add(0, self.index_B, x_B)[self.index_B]

    def largest(self, x_B: Tensor) -> Tensor:
        """Return the maximum [B] of x over each response's group."""
        return torch.full_like(x_B, -math.inf).scatter_reduce(0, self.index_B, x_B, "amax")[self.index_B]

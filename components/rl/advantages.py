"""Advantages of responses: how much better each was than the others to the same prompt.

B responses. `group_mean_baseline`, `rloo` and `group_norm` turn rewards [B] into rewards [B], which
`rewards.token_rewards` then puts on tokens. Dr. GRPO is `group_mean_baseline` with the aggregation
seq-mean-token-sum-norm. `returns` has the advantages of tokens, `group_advantages` further comparisons.
"""

import math

import torch
from torch import Tensor

from components.rl.masked import (
    check_sequences,
)


def group_mean_baseline(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Reward minus the mean of its group, the responses to one prompt.

    Source: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783), GRPO's advantage without its division; the group mean of
    Hu et al. 2025 (REINFORCE++-baseline, arXiv 2501.03262).

    Args:
        reward_B: [B] reward of each response.
        group_B: [B] integers, equal for the responses to one prompt; any numbers, in any order, of groups of any size.

    Returns:
        [B] float32 without gradient. 0 for a response that is alone in its group.
    """
    return Groups(reward_B, group_B).centred_B.float()


def rloo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Reward minus the mean of the other responses to the same prompt: R_i - (sum - R_i) / (n - 1).

    Source: Ahmadian et al. 2024 (RLOO, arXiv 2402.14740), after Kool et al. 2019.

    Args:
        reward_B: [B] reward of each response.
        group_B: [B] integers, as in `group_mean_baseline`.

    Returns:
        [B] float32 without gradient. 0 for a response that is alone in its group: there are no others to compare with,
        and its bare reward would be an advantage without a baseline among others that have one. (verl's rloo keeps it,
        its rloo_vectorized does not.)
    """
    groups = Groups(reward_B, group_B)
    # R - (n mean - R) / (n - 1) = (R - mean) n / (n - 1)
    return (groups.centred_B * groups.size_B / (groups.size_B - 1).clamp(min=1)).float()


def group_norm(reward_B: Tensor, group_B: Tensor, epsilon: float = 1e-4) -> Tensor:
    """Reward minus the mean of its group, divided by the group's standard deviation: (R - mean) / (std + epsilon).

    Source: Shao et al. 2024 (GRPO, arXiv 2402.03300), section 4.1.2; the deviation is the unbiased one, as in OpenRLHF
    and verl.

    Args:
        reward_B: [B] reward of each response.
        group_B: [B] integers, as in `group_mean_baseline`.
        epsilon: TRL has 1e-4, verl 1e-6, OpenRLHF 1e-9. Rewards of 1 that a float32 sum left one digit apart get an
            advantage of 0.0009, 0.08 or 1.5.

    Returns:
        [B] float32 without gradient. Exactly 0 in a group whose rewards are all equal, as in a group of one. (verl
        leaves the reward of a group of one as it is.)
    """
    groups = Groups(reward_B, group_B)
    return (groups.centred_B / (groups.std_B + epsilon)).float()


def group_std(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """[B] the unbiased standard deviation of the rewards of each response's group; exactly 0 where they are all
    equal.
    """
    return Groups(reward_B, group_B).std_B.float()


class Groups:
    """Rewards beside those of their group.

    In float64 the sum of equal float32 numbers is exact, so that their mean is that number. In float32 it may differ
    in the last digit, and a difference of 1e-8 divided by a deviation of as much would be an advantage of 1.
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
        """[B] unbiased standard deviation of each response's group; 0 in a group of one."""
        return (self.sums(self.centred_B.square()) / (self.size_B - 1).clamp(min=1)).sqrt()

    def sums(self, x_B: Tensor) -> Tensor:
        """[B] the sum of x over each response's group."""
        return torch.zeros_like(x_B).index_add(0, self.index_B, x_B)[self.index_B]

    def largest(self, x_B: Tensor) -> Tensor:
        """[B] the largest x of each response's group."""
        return torch.full_like(x_B, -math.inf).scatter_reduce(0, self.index_B, x_B, "amax")[self.index_B]

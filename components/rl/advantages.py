"""Advantages: how much better an action, or a whole answer, was than the policy's average one.

B sequences; N all tokens of a batch end to end; M action tokens among them.
"""

from itertools import pairwise

import torch
from torch import Tensor

from components.ragged import Layout
from components.rl.masked import check_columns


def gae(
    reward_N: Tensor, value_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens that the policy produced.

    Source: Schulman et al. 2016 (arXiv 1506.02438), equation 16: with delta_t = r_t + gamma V_{t+1} - V_t,
    A_t = delta_t + gamma lambda A_{t+1}, and nothing after the end. A time step is an action token: what the
    environment wrote in between takes no time, so the last action before it bootstraps from the first one after it.

    Args:
        reward_N: [N] reward of each action token.
        value_N: [N] value of the state before each token.
        action_mask_N: [N] bool, True where the policy produced the token; only there are the inputs read.
        lengths_B: [B] tokens in each sequence.
        gamma: discount per action token, 0 to 1.
        lambd: trace decay per action token, 0 (one-step) to 1 (Monte Carlo).

    Returns:
        advantage_N, return_N = advantage_N + value_N: [N] float32 without gradient, 0 where the policy did not act.
    """
    _check_shares(gamma=gamma, lambd=lambd)
    sequence_M, (reward_M, value_M) = _action_tokens(action_mask_N, lengths_B, reward_N=reward_N, value_N=value_N)
    next_value_M = torch.zeros_like(value_M)
    next_value_M[:-1] = torch.where(sequence_M[1:] == sequence_M[:-1], value_M[1:], 0.0)
    delta_M = reward_M + gamma * next_value_M - value_M
    advantage_M = _discounted_sums(delta_M, torch.bincount(sequence_M, minlength=len(lengths_B)), gamma * lambd)
    advantage_N = torch.zeros_like(action_mask_N, dtype=torch.float32)
    return_N = torch.zeros_like(advantage_N)
    advantage_N[action_mask_N] = advantage_M
    return_N[action_mask_N] = advantage_M + value_M
    return advantage_N, return_N


def discounted_returns(reward_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, gamma: float) -> Tensor:
    """What the policy earned from each of its tokens on: G_t = r_t + gamma G_{t+1}, and nothing after the end.

    Source: Williams 1992 (REINFORCE), with discounting as in Sutton and Barto, Reinforcement Learning, 2nd edition,
    equation 3.9. A time step is an action token, as in `gae`: what the environment wrote takes no time.

    Args:
        reward_N: [N] reward of each action token.
        action_mask_N: [N] bool, True where the policy produced the token; only there is the reward read.
        lengths_B: [B] tokens in each sequence.
        gamma: discount per action token, 0 to 1.

    Returns:
        [N] float32 without gradient, 0 where the policy did not act.
    """
    _check_shares(gamma=gamma)
    sequence_M, (reward_M,) = _action_tokens(action_mask_N, lengths_B, reward_N=reward_N)
    return_N = torch.zeros_like(action_mask_N, dtype=torch.float32)
    return_N[action_mask_N] = _discounted_sums(reward_M, torch.bincount(sequence_M, minlength=len(lengths_B)), gamma)
    return return_N


def group_mean_baseline(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Reward minus the mean of its group, the answers to one prompt.

    Source: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783), GRPO's advantage without its division; the group mean of
    Hu et al. 2025 (REINFORCE++-baseline, arXiv 2501.03262).

    Args:
        reward_B: [B] reward of each answer.
        group_B: [B] integers, equal for the answers to one prompt; any numbers, in any order, of groups of any size.

    Returns:
        [B] float32 without gradient. 0 for an answer that is alone in its group.
    """
    centred_B, _, _ = _groups(reward_B, group_B)
    return centred_B.float()


def leave_one_out(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Reward minus the mean of the other answers to the same prompt: R_i - (sum - R_i) / (n - 1).

    Source: Ahmadian et al. 2024 (RLOO, arXiv 2402.14740), after Kool et al. 2019.

    Args:
        reward_B: [B] reward of each answer.
        group_B: [B] integers, as in `group_mean_baseline`.

    Returns:
        [B] float32 without gradient. 0 for an answer that is alone in its group: there are no others to compare with,
        and its bare reward would be an advantage without a baseline among others that have one.
    """
    centred_B, size_B, _ = _groups(reward_B, group_B)
    # R - (n mean - R) / (n - 1) = (R - mean) n / (n - 1)
    return (centred_B * size_B / (size_B - 1).clamp(min=1)).float()


def group_norm(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Reward minus the mean of its group, divided by the group's standard deviation: (R - mean) / (std + 1e-9).

    Source: Shao et al. 2024 (GRPO, arXiv 2402.03300), section 4.1.2; the unbiased deviation and 1e-9 are OpenRLHF's.

    Args:
        reward_B: [B] reward of each answer.
        group_B: [B] integers, as in `group_mean_baseline`.

    Returns:
        [B] float32 without gradient. Exactly 0 in a group whose rewards are all equal, as in a group of one.
    """
    centred_B, size_B, index_B = _groups(reward_B, group_B)
    square_B = torch.zeros_like(centred_B).index_add(0, index_B, centred_B.square())[index_B]
    std_B = (square_B / (size_B - 1).clamp(min=1)).sqrt()
    return (centred_B / (std_B + 1e-9)).float()


def _groups(reward_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B] float64 rewards minus the mean of their group, [B] sizes of the groups, [B] groups counted from 0.

    In float64 the sum of equal float32 numbers is exact, so that their mean is that number. In float32 it may differ
    in the last digit, and a difference of 1e-8 divided by a deviation of as much would be an advantage of 1.
    """
    if reward_B.dim() != 1 or reward_B.shape != group_B.shape:
        raise ValueError(
            f"reward_B has shape {list(reward_B.shape)}, group_B {list(group_B.shape)}; both must be [B], one entry "
            "per sequence"
        )
    if group_B.is_floating_point() or group_B.dtype == torch.bool:
        raise ValueError(f"group_B is {group_B.dtype}; give each sequence the integer id of its prompt")
    _, index_B, count = torch.unique(group_B, return_inverse=True, return_counts=True)
    size_B = count[index_B]
    wide_B = reward_B.detach().float().double()
    sum_B = torch.zeros_like(wide_B).index_add(0, index_B, wide_B)[index_B]
    return wide_B - sum_B / size_B, size_B, index_B


def _check_shares(**shares: float) -> None:
    for name, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name}={share}; it must be between 0 and 1")


def _action_tokens(action_mask_N: Tensor, lengths_B: Tensor, **columns: Tensor) -> tuple[Tensor, list[Tensor]]:
    """[M] the sequence of each action token, and of each column its [M] float32 part without gradient."""
    check_columns(action_mask_N, **columns)
    layout = Layout(lengths_B)
    if layout.num_tokens != len(action_mask_N):
        raise ValueError(f"lengths_B sum to {layout.num_tokens} tokens, but the columns have {len(action_mask_N)}")
    return layout.sequence_ids[action_mask_N], [x_N.detach().float()[action_mask_N] for x_N in columns.values()]


def _discounted_sums(x_M: Tensor, lengths_B: Tensor, discount: float) -> Tensor:
    """[M] y_t = x_t + discount * y_{t+1} within each sequence.

    The entries are laid out by their distance from the end, the longest sequences first. Then the entries of one
    distance are adjacent, each has its successor at the same place among those of the distance before, and one
    vector operation per distance does all sequences, without any padding.
    """
    layout = Layout(lengths_B)
    if layout.num_tokens == 0:
        return x_M.clone()
    rank_B = torch.argsort(torch.argsort(lengths_B, descending=True, stable=True))
    distance_M = layout.offsets[1:][layout.sequence_ids] - 1 - torch.arange(len(x_M), device=x_M.device)
    # How many sequences are longer than each distance.
    width_T = torch.bincount(distance_M)
    place_M = (width_T.cumsum(0) - width_T)[distance_M] + rank_B[layout.sequence_ids]
    y_M = torch.empty_like(x_M)
    y_M[place_M] = x_M
    rows = y_M.split(width_T.tolist())
    for later, row in pairwise(rows):
        row.add_(later[: len(row)], alpha=discount)
    return y_M[place_M]


def whiten(x_N: Tensor, mask_N: Tensor, *, shift_mean: bool = True, scale: bool = True) -> Tensor:
    """Shift to mean 0 and scale to variance 1 over the masked tokens; the variance is that of the population.

    Source: Andrychowicz et al. 2021 (arXiv 2006.05990), "per minibatch advantage normalisation", here over all
    tokens that are given at once.

    Args:
        x_N: [N]; only read where the mask is True.
        mask_N: [N] bool.
        shift_mean: False keeps the mean where it was.
        scale: False keeps the spread as it was.

    Returns:
        [N] float32, 0 outside the mask. Tokens that are all alike become 0, not NaN.
    """
    check_columns(mask_N, x_N=x_N)
    out_N = torch.zeros_like(x_N, dtype=torch.float32)
    x_M = x_N.float()[mask_N]
    if len(x_M) == 0:
        return out_N
    mean = x_M.mean()
    centred_M = x_M - mean
    if scale:
        centred_M = centred_M * torch.rsqrt(centred_M.square().mean().clamp(min=1e-8))
    out_N[mask_N] = centred_M if shift_mean else centred_M + mean
    return out_N

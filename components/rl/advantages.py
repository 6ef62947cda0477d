"""Advantages of tokens: how much better an action was than the policy's average one.

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
    check_columns(action_mask_N, reward_N=reward_N, value_N=value_N)
    for name, share in (("gamma", gamma), ("lambd", lambd)):
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name}={share}; it must be between 0 and 1")
    layout = Layout(lengths_B)
    if layout.num_tokens != len(action_mask_N):
        raise ValueError(f"lengths_B sum to {layout.num_tokens} tokens, but the columns have {len(action_mask_N)}")
    sequence_M = layout.sequence_ids[action_mask_N]
    reward_M = reward_N.detach().float()[action_mask_N]
    value_M = value_N.detach().float()[action_mask_N]
    next_value_M = torch.zeros_like(value_M)
    next_value_M[:-1] = torch.where(sequence_M[1:] == sequence_M[:-1], value_M[1:], 0.0)
    delta_M = reward_M + gamma * next_value_M - value_M
    advantage_M = _discounted_sums(delta_M, torch.bincount(sequence_M, minlength=len(layout)), gamma * lambd)
    advantage_N = torch.zeros_like(action_mask_N, dtype=torch.float32)
    return_N = torch.zeros_like(advantage_N)
    advantage_N[action_mask_N] = advantage_M
    return_N[action_mask_N] = advantage_M + value_M
    return advantage_N, return_N


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

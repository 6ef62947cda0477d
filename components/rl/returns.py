"""Advantages of tokens: returns along each sequence, and normalisation over all sequences.

B sequences; N all tokens of a batch end to end; U turns: consecutive tokens that the policy produced.

`turn_advantages` compares the turns of the responses to one prompt. `whiten` needs all responses of a step at once:
with the responses of one rank it gives another result.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from components.rl.masked import check_columns, check_lengths, chosen, sequence_sums, spread
from components.rl.recurrence import carried_back


def gae(
    reward_N: Tensor, value_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens that the policy produced.

    Source: Schulman et al. 2016 (arXiv 1506.02438), equation 16: with delta_t = r_t + gamma V_{t+1} - V_t,
    A_t = delta_t + gamma lambda A_{t+1}, with zeros after the end of the sequence. A time step is an action token.
    Tokens of the environment are not time steps: the last action before them bootstraps from the first action after
    them. verl does the same. OpenRLHF counts them as time steps with a value of 0 and discounts once per token.

    Args:
        reward_N: [N] reward of each action token.
        value_N: [N] value of the state before each token.
        action_mask_N: [N] bool, True where the policy produced the token. Inputs elsewhere are ignored.
        lengths_B: [B] number of tokens in each sequence.
        gamma: discount per action token, 0 to 1.
        lambd: trace decay per action token, 0 (one-step) to 1 (Monte Carlo).

    Returns:
        advantage_N and return_N = advantage_N + value_N: [N] float32 without gradient, 0 outside the mask.

    Raises:
        ValueError: shapes differ, or gamma or lambd is outside 0 to 1.
    """
    _check_shares(gamma=gamma, lambd=lambd)
    check_columns(action_mask_N, reward_N=reward_N, value_N=value_N)
    check_lengths(action_mask_N, lengths_B)
    value_N = chosen(action_mask_N, value_N.detach())
    next_value_N = _next_values(value_N, action_mask_N, lengths_B)
    delta_N = chosen(action_mask_N, next_value_N.mul_(gamma).add_(reward_N.detach()).sub_(value_N))
    advantage_N = _discounted(delta_N, action_mask_N, lengths_B, gamma * lambd)
    return advantage_N, advantage_N + value_N


def discounted_returns(reward_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, gamma: float) -> Tensor:
    """Discounted return of each action token: G_t = r_t + gamma G_{t+1}, with zeros after the end of the sequence.

    Source: Williams 1992 (REINFORCE), with discounting as in Sutton and Barto, Reinforcement Learning, 2nd edition,
    equation 3.9. A time step is an action token, as in `gae`; tokens of the environment are not time steps. Whitened
    returns are the advantages of REINFORCE++ (Hu et al. 2025, arXiv 2501.03262).

    Args:
        reward_N: [N] reward of each action token.
        action_mask_N: [N] bool, True where the policy produced the token. Rewards elsewhere are ignored.
        lengths_B: [B] number of tokens in each sequence.
        gamma: discount per action token, 0 to 1.

    Returns:
        [N] float32 without gradient, 0 outside the mask.

    Raises:
        ValueError: shapes differ, or gamma is outside 0 to 1.
    """
    _check_shares(gamma=gamma)
    check_columns(action_mask_N, reward_N=reward_N)
    check_lengths(action_mask_N, lengths_B)
    return _discounted(chosen(action_mask_N, reward_N.detach()), action_mask_N, lengths_B, gamma)


def turn_returns(
    reward_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, gamma: float, turn_N: Tensor | None = None
) -> Tensor:
    """Discounted return of each turn, at every token of the turn: G_k = R_k + gamma G_{k+1}.

    A time step is a turn. R_k is the sum of the rewards of its tokens, so a long turn is discounted as much as a short
    one.

    Source: returns as in `discounted_returns`, with turns as actions, as in Zeng et al. 2025 (arXiv 2505.11821) and
    Zhou et al. 2024 (ArCHer, arXiv 2402.19446).

    Args:
        reward_N: [N] reward of each action token. Its position within the turn does not matter.
        action_mask_N: [N] bool, True where the policy produced the token.
        lengths_B: [B] number of tokens in each sequence.
        gamma: discount per turn, 0 to 1.
        turn_N: [N] integer ids, equal within a turn and different in the next turn. With None, a turn is an unbroken
            run of tokens that the policy produced; two turns without a token between them then count as one.

    Returns:
        [N] float32 without gradient, 0 outside the mask.

    Raises:
        ValueError: shapes differ, or gamma is outside 0 to 1.
    """
    _check_shares(gamma=gamma)
    check_columns(action_mask_N, reward_N=reward_N)
    check_lengths(action_mask_N, lengths_B)
    if turn_N is not None:
        check_columns(action_mask_N, turn_N=turn_N)
    first_U, last_U, is_final_U = _turns(action_mask_N, lengths_B, turn_N)
    size_U = last_U - first_U + 1
    # The action tokens, in their order, are exactly the tokens of all turns end to end, so size_U splits them.
    reward_U = sequence_sums(reward_N.detach().float()[action_mask_N], size_U)
    return_U = carried_back(reward_U, torch.where(is_final_U, 0.0, gamma))
    return_N = torch.zeros_like(reward_N, dtype=torch.float32)
    return_N[action_mask_N] = spread(return_U, size_U, int(size_U.sum()))
    return return_N


def turn_advantages(
    reward_N: Tensor,
    action_mask_N: Tensor,
    lengths_B: Tensor,
    group_B: Tensor,
    gamma: float,
    compare: Callable[[Tensor, Tensor], Tensor],
    turn_N: Tensor | None = None,
) -> Tensor:
    """Advantage of each turn: its return relative to the same turn of the other episodes in the group.

    The k-th turn of an episode is compared with the k-th turns of the episodes that have at least k turns. This
    baseline does not depend on the turn's own action. With one turn per episode, complete responses are compared.

    Source: turn-level credit as in Zeng et al. 2025 (arXiv 2505.11821), with the returns of `turn_returns`.

    Args:
        reward_N: [N] reward of each action token. Its position within the turn does not matter.
        action_mask_N: [N] bool, True where the policy produced the token.
        lengths_B: [B] number of tokens in each sequence.
        group_B: [B] integer ids, equal for the episodes from one prompt.
        gamma: discount per turn, 0 to 1.
        compare: function of returns [U] and integer group ids [U] that returns advantages [U]: `group_mean_baseline`,
            `rloo`, `group_norm` or another with this signature.
        turn_N: [N] integer ids, as in `turn_returns`.

    Returns:
        [N] float32 without gradient: the same at all tokens of a turn, 0 outside the mask.

    Raises:
        ValueError: shapes differ, or gamma is outside 0 to 1.
    """
    return_N = turn_returns(reward_N, action_mask_N, lengths_B, gamma, turn_N)
    if group_B.shape != lengths_B.shape:
        raise ValueError(
            f"group_B has shape {list(group_B.shape)}, lengths_B {list(lengths_B.shape)}; both must be [B]"
        )
    first_U, last_U, is_final_U = _turns(action_mask_N, lengths_B, turn_N)
    owner_U = torch.searchsorted(lengths_B.cumsum(0), first_U, right=True)
    # A turn's number within its sequence: its index over all sequences minus the index of its sequence's first turn.
    index_U = torch.arange(len(first_U), device=first_U.device)
    is_first_U = torch.ones_like(is_final_U)
    is_first_U[1:] = is_final_U[:-1]
    number_U = index_U - torch.where(is_first_U, index_U, 0).cummax(0).values
    # One group per pair (prompt, number of the turn).
    _, group_U = torch.stack([group_B[owner_U], number_U]).unique(dim=1, return_inverse=True)
    size_U = last_U - first_U + 1
    advantage_N = torch.zeros_like(return_N)
    advantage_N[action_mask_N] = spread(compare(return_N[first_U], group_U), size_U, int(size_U.sum()))
    return advantage_N


def remax(reward_N: Tensor, greedy_reward_B: Tensor, action_mask_N: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """Undiscounted returns minus the reward of the policy's greedy response to the same prompt.

    Source: Li et al. 2023 (ReMax, arXiv 2310.10505), algorithm 1.

    Args:
        reward_N: [N] reward of each action token.
        greedy_reward_B: [B] reward of the greedy response to each sequence's prompt.
        action_mask_N: [N] bool, True where the policy produced the token.
        lengths_B: [B] number of tokens in each sequence.

    Returns:
        advantage_N, return_N: [N] float32 without gradient, 0 outside the mask.

    Raises:
        ValueError: shapes differ.
    """
    if greedy_reward_B.shape != lengths_B.shape:
        raise ValueError(f"greedy_reward_B has shape {list(greedy_reward_B.shape)}, not {list(lengths_B.shape)}")
    return_N = discounted_returns(reward_N, action_mask_N, lengths_B, 1.0)
    baseline_N = spread(greedy_reward_B.detach().float(), lengths_B, len(return_N))
    return chosen(action_mask_N, return_N - baseline_N), return_N


def optimal_token_baseline(
    reward_N: Tensor, energy_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, group_B: Tensor, epsilon: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """Returns minus a per-token baseline that minimises the variance of the gradient.

    The baseline of token t is the weighted mean return B_t = sum(W G) / sum(W) over the group's responses that have a
    t-th action token. W_t is the cumulative energy: the sum of 1 - 2 p_j + sum_v p_v^2 over the action tokens j up to
    t. Each term is the squared norm of the gradient of log p_j with respect to the logits.

    Source: Li et al. 2026 (The Optimal Token Baseline, arXiv 2602.07078), as in verl. Only tokens that the policy
    produced are counted, as in verl's `tir_optimal_token_baseline`. Without environment tokens its two functions are
    the same. Where only the longest response has tokens left, the baseline is 0.

    Args:
        reward_N: [N] reward of each action token.
        energy_N: [N] 1 - 2 p + sum_v p_v^2 of each action token, times the square of its importance weight if the
            loss uses one.
        action_mask_N: [N] bool, True where the policy produced the token.
        lengths_B: [B] number of tokens in each sequence.
        group_B: [B] integer ids, equal for the responses to one prompt.
        epsilon: added to the sum of W.

    Returns:
        advantage_N, return_N: [N] float32 without gradient, 0 outside the mask. The advantages of the only response in
        a group are its returns.

    Raises:
        ValueError: shapes differ.
    """
    return_N = discounted_returns(reward_N, action_mask_N, lengths_B, 1.0)
    check_columns(action_mask_N, energy_N=energy_N)
    _, group_B = group_B.unique(return_inverse=True)
    owner_N = spread(torch.arange(len(lengths_B)), lengths_B, len(return_N))
    count_N = action_mask_N.cumsum(0)
    before_B = torch.cat([count_N.new_zeros(1), count_N])[lengths_B.cumsum(0) - lengths_B]
    position_N = count_N - 1 - before_B[owner_N]
    energy_N = chosen(action_mask_N, energy_N.detach().float())
    # One cumulative sum over all sequences, minus its value at each sequence's start. In float64, because that
    # difference of two large sums would lose its digits in float32.
    total_energy_N = energy_N.double().cumsum(0)
    start_energy_B = torch.cat([total_energy_N.new_zeros(1), total_energy_N])[lengths_B.cumsum(0) - lengths_B]
    weight_M = (total_energy_N - start_energy_B[owner_N])[action_mask_N]
    # A cell is a pair (group, position): the responses in it share one baseline.
    cells, cell_M = torch.stack([group_B[owner_N], position_N])[:, action_mask_N].unique(dim=1, return_inverse=True)
    return_M = return_N[action_mask_N].double()
    sums = torch.zeros(3, cells.shape[1], dtype=torch.float64)
    for row, x_M in zip(sums, (weight_M * return_M, weight_M, torch.ones_like(weight_M)), strict=True):
        row.index_add_(0, cell_M, x_M)
    # A response alone at a position would be its own baseline, and its advantage 0.
    baseline_C = torch.where(sums[2] > 1, sums[0] / (sums[1] + epsilon), 0.0)
    advantage_N = torch.zeros_like(return_N)
    advantage_N[action_mask_N] = (return_M - baseline_C[cell_M]).float()
    return advantage_N, return_N


def whiten(x_N: Tensor, mask_N: Tensor, *, scale: bool = True, unbiased: bool = False) -> Tensor:
    """Shift to mean 0 and scale to variance 1 over the masked tokens.

    Source: Andrychowicz et al. 2021 (arXiv 2006.05990), "per minibatch advantage normalisation", here over all
    tokens of the call.

    Args:
        x_N: [N] values. Entries outside the mask are ignored.
        mask_N: [N] bool.
        scale: scale to variance 1. False only shifts the mean.
        unbiased: divide by count - 1 for the variance, as verl does. False divides by count, as OpenRLHF does.

    Returns:
        [N] float32, 0 outside the mask. Equal values, or a single value, become 0 instead of NaN. A NaN inside the mask
        makes all masked entries NaN.
    """
    check_columns(mask_N, x_N=x_N)
    count = int(mask_N.sum())
    x_N = chosen(mask_N, x_N.detach())
    if count == 0:
        return x_N
    # In float64 the mean of equal numbers is exactly that number, and no square overflows.
    mean = (x_N.sum(dtype=torch.float64) / count).float()
    centred_N = chosen(mask_N, x_N - mean)
    if scale:
        variance = torch.linalg.vector_norm(centred_N, dtype=torch.float64).square() / max(count - unbiased, 1)
        centred_N *= torch.rsqrt(variance.clamp(min=1e-8)).float()
    return centred_N


def _check_shares(**shares: float) -> None:
    for name, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name}={share}; it must be between 0 and 1")


def _discounted(x_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor, discount: float) -> Tensor:
    """Return y_t = x_t + discount * y_next [N], with the next action token of the sequence; 0 outside the mask."""
    # Environment tokens pass the later sum on undiscounted, because they are not time steps.
    carry_N = torch.where(action_mask_N, discount, 1.0)
    carry_N[(lengths_B.cumsum(0) - 1)[lengths_B > 0]] = 0.0
    return chosen(action_mask_N, carried_back(x_N, carry_N))


def _next_values(value_N: Tensor, action_mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the value [N] at the next action token of the same sequence; 0 at the last action token."""
    first_U, last_U, is_final_U = _turns(action_mask_N, lengths_B)
    next_N = torch.cat([value_N[1:], value_N.new_zeros(1)])[: len(value_N)]
    # The successor of an action token is the next token; at the end of a turn it is the first token of the next turn.
    following_U = torch.cat([value_N[first_U[1:]], value_N.new_zeros(1)])[: len(last_U)]
    next_N[last_U] = torch.where(is_final_U, 0.0, following_U)
    return next_N


def _turns(action_mask_N: Tensor, lengths_B: Tensor, turn_N: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the index of each turn's first token [U], of its last token [U], and a mask of final turns [U].

    A final turn is the last turn of its sequence.
    """
    starts_N = torch.zeros_like(action_mask_N)
    ends_N = torch.zeros_like(action_mask_N)
    end_B = lengths_B.cumsum(0)
    filled_B = lengths_B > 0
    starts_N[(end_B - lengths_B)[filled_B]] = True
    ends_N[(end_B - 1)[filled_B]] = True
    starts_N[1:] |= ~action_mask_N[:-1]
    ends_N[:-1] |= ~action_mask_N[1:]
    if turn_N is not None:
        is_border = turn_N[1:] != turn_N[:-1]
        starts_N[1:] |= is_border
        ends_N[:-1] |= is_border
    first_U = (action_mask_N & starts_N).nonzero().squeeze(1)
    last_U = (action_mask_N & ends_N).nonzero().squeeze(1)
    owner_U = torch.searchsorted(end_B, first_U, right=True)
    is_final_U = torch.ones_like(owner_U, dtype=torch.bool)
    is_final_U[:-1] = owner_U[1:] != owner_U[:-1]
    return first_U, last_U, is_final_U

"""Rewards of single tokens with a KL penalty, and the penalty of truncated responses.

Shape suffixes: B sequences; N all tokens of a batch end to end.
"""

import torch
from torch import Tensor

from components.batch.ragged import Layout
from components.rl.masked import check_columns, check_sequences


def token_rewards(
    reward_B: Tensor, kl_N: Tensor | None, kl_coef: float, action_mask_N: Tensor, lengths_B: Tensor
) -> Tensor:
    """Return per-token rewards: the KL penalty on every action token, plus the sequence's reward on its last one.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), equation 2, with the KL per token.

    Args:
        reward_B: [B] reward of each sequence. The reward of a sequence without an action token is dropped.
        kl_N: [N] KL estimate in nats, or None without a reference. Entries outside the mask are ignored.
        kl_coef: penalty per nat.
        action_mask_N: [N] bool, True where the policy produced the token.
        lengths_B: [B] number of tokens in each sequence.

    Returns:
        [N] float32, 0 outside the mask.

    Raises:
        ValueError: shapes differ.
    """
    layout = Layout(lengths_B)
    check_columns(action_mask_N, **({} if kl_N is None else {"kl_N": kl_N}))
    if len(action_mask_N) != layout.num_tokens or reward_B.shape != lengths_B.shape:
        raise ValueError(
            f"reward_B has shape {list(reward_B.shape)} and action_mask_N {list(action_mask_N.shape)}, but there "
            f"are {len(layout)} sequences of {layout.num_tokens} tokens in all"
        )
    reward_N = torch.zeros_like(action_mask_N, dtype=torch.float32)
    if kl_N is not None and kl_coef != 0:
        reward_N = torch.where(action_mask_N, -kl_coef * kl_N.float(), reward_N)
    action = action_mask_N.nonzero().squeeze(1)
    last_B = torch.full_like(layout.lengths, -1)
    # The maximum index of a sequence's action tokens; -1 remains for a sequence without one.
    last_B = last_B.scatter_reduce(0, layout.sequence_ids[action], action, "amax")
    acts_B = last_B >= 0
    return reward_N.index_add(0, last_B[acts_B], reward_B.float()[acts_B])


def stop_properly_penalty(reward_B: Tensor, truncated_B: Tensor, coef: float) -> Tensor:
    """Lower the reward of truncated responses.

    Source: OpenRLHF's stop-properly penalty, of the ProRL v2 recipe.

    Args:
        reward_B: [B] reward of each response.
        truncated_B: [B] bool, True where the response was truncated.
        coef: 0 to 1: factor of the reward of truncated responses. Below 0: their reward is replaced by coef.

    Returns:
        [B] float32. The rewards of other responses do not change.

    Raises:
        ValueError: shapes differ, or truncated_B is not bool.
    """
    check_sequences(reward_B, truncated_B=truncated_B)
    if truncated_B.dtype != torch.bool:
        raise ValueError(f"truncated_B is {truncated_B.dtype}; it must be bool, True where a response was cut off")
    reward_B = reward_B.float()
    lowered_B = reward_B * coef
    if coef < 0:
        # 0.0 * reward_B + coef instead of coef, which would hide a reward that is NaN.
        lowered_B = 0.0 * reward_B + coef
    return torch.where(truncated_B, lowered_B, reward_B)

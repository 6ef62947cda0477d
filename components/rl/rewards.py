"""Rewards: shaped by how an answer ended, and spread over its tokens.

B sequences; N all tokens of a batch end to end.
"""

import math

import torch
from torch import Tensor

from components.ragged import Layout
from components.rl.masked import check_columns


def token_rewards(
    reward_B: Tensor, kl_N: Tensor | None, kl_coef: float, action_mask_N: Tensor, lengths_B: Tensor
) -> Tensor:
    """The KL penalty on every action token, and the sequence's reward on its last one.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), equation 2, with its KL taken token by token.

    Args:
        reward_B: [B] reward of each sequence. One without an action token earns nothing.
        kl_N: [N] KL estimate in nats; None when there is no reference. Read on action tokens only.
        kl_coef: reward per nat that is taken away.
        action_mask_N: [N] bool, True where the policy produced the token.
        lengths_B: [B] tokens in each sequence.

    Returns:
        [N] float32, 0 where the policy did not act.
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
    last_B = last_B.scatter_reduce(0, layout.sequence_ids[action], action, "amax")
    acts_B = last_B >= 0
    return reward_N.index_add(0, last_B[acts_B], reward_B.float()[acts_B])


def overlong_penalty(
    reward_B: Tensor, response_length_B: Tensor, max_length: int, buffer_length: int, factor: float
) -> Tensor:
    """Take reward away from answers that reach into the last tokens they may have, the more the further they reach.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13 with factor 1: with exceed = min(length - (max_length
    - buffer_length), buffer_length), the reward is lowered by exceed / buffer_length * factor where exceed > 0.

    Args:
        reward_B: [B].
        response_length_B: [B] tokens of each answer.
        max_length: tokens that an answer may have.
        buffer_length: so many tokens before max_length the penalty starts, 1 to max_length.
        factor: reward that an answer of max_length tokens loses, at least 0.

    Returns:
        [B] float32.
    """
    _check_sequences(reward_B, response_length_B=response_length_B)
    if not 1 <= buffer_length <= max_length:
        raise ValueError(f"buffer_length={buffer_length}; set 1 to max_length={max_length} tokens")
    if not 0 <= factor < math.inf:
        raise ValueError(f"factor={factor}; set the reward that the longest answer loses, 0 or more")
    exceed_B = (response_length_B - (max_length - buffer_length)).clamp(0, buffer_length)
    return reward_B.float() - exceed_B.float() / buffer_length * factor


def stop_properly_penalty(reward_B: Tensor, truncated_B: Tensor, coef: float) -> Tensor:
    """Lower the reward of answers that were cut off before they came to an end.

    Source: OpenRLHF's stop-properly penalty, of the ProRL v2 recipe.

    Args:
        reward_B: [B].
        truncated_B: [B] bool, True where the answer was cut off.
        coef: 0 to 1: their reward is multiplied by it; below 0: it is their reward, whatever they earned.

    Returns:
        [B] float32; the rewards of other answers as they were.
    """
    _check_sequences(reward_B, truncated_B=truncated_B)
    if truncated_B.dtype != torch.bool:
        raise ValueError(f"truncated_B is {truncated_B.dtype}; it must be bool, True where an answer was cut off")
    if not -math.inf < coef <= 1:
        raise ValueError(f"coef={coef}; set 0 to 1 to scale the reward of truncated answers, below 0 to replace it")
    reward_B = reward_B.float()
    return torch.where(truncated_B, reward_B * coef if coef >= 0 else coef, reward_B)


def _check_sequences(reward_B: Tensor, **columns: Tensor) -> None:
    for name, x_B in columns.items():
        if reward_B.dim() != 1 or x_B.shape != reward_B.shape:
            raise ValueError(f"reward_B has shape {list(reward_B.shape)}, {name} {list(x_B.shape)}; both must be [B]")

"""Rewards: shaped by how a response ended, spread over its tokens, and which groups of them teach something.

B sequences; G groups, each the responses to one prompt; N all tokens of a batch end to end.
"""

import torch
from torch import Tensor

from components.batch.ragged import Layout
from components.rl.advantages import Groups
from components.rl.masked import check_columns, check_sequences


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
    """Take reward away from responses that reach into the last tokens they may have, the more the further they reach.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13 with factor 1: with exceed = min(length - (max_length
    - buffer_length), buffer_length), the reward is lowered by exceed / buffer_length * factor where exceed > 0.

    Args:
        reward_B: [B].
        response_length_B: [B] tokens of each response.
        max_length: tokens that a response may have.
        buffer_length: so many tokens before max_length the penalty starts, 1 to max_length.
        factor: reward that a response of max_length tokens loses, at least 0.

    Returns:
        [B] float32.
    """
    check_sequences(reward_B, response_length_B=response_length_B)
    exceed_B = (response_length_B - (max_length - buffer_length)).clamp(0, buffer_length)
    return reward_B.float() - exceed_B.float() / buffer_length * factor


def stop_properly_penalty(reward_B: Tensor, truncated_B: Tensor, coef: float) -> Tensor:
    """Lower the reward of responses that were cut off before they came to an end.

    Source: OpenRLHF's stop-properly penalty, of the ProRL v2 recipe.

    Args:
        reward_B: [B].
        truncated_B: [B] bool, True where the response was cut off.
        coef: 0 to 1: their reward is multiplied by it; below 0: it is their reward, whatever they earned.

    Returns:
        [B] float32; the rewards of other responses as they were.
    """
    check_sequences(reward_B, truncated_B=truncated_B)
    if truncated_B.dtype != torch.bool:
        raise ValueError(f"truncated_B is {truncated_B.dtype}; it must be bool, True where a response was cut off")
    reward_B = reward_B.float()
    # Not the bare coef, which would hide a reward that is NaN.
    return torch.where(truncated_B, reward_B * coef if coef >= 0 else 0.0 * reward_B + coef, reward_B)


def groups_within(score_B: Tensor, group_B: Tensor, low: float, high: float) -> Tensor:
    """Which responses belong to a group whose mean score lies between two bounds: dynamic sampling.

    A group whose responses are all right or all wrong has an advantage of 0 everywhere, and teaches nothing.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2, equation 11: 0 < correct responses < all, which is low
    = 0 and high = 1. To be used on scores of outcomes; shaped rewards also differ in a group that is right throughout.

    Args:
        score_B: [B] score of each response.
        group_B: [B] integers, equal for the responses to one prompt; any numbers, in any order, of groups of any size.
        low: the mean must be above it. Means and bounds are compared in float32, as scores are written.
        high: the mean must be below it.

    Returns:
        [B] bool, the same for all responses of a group.

    Raises:
        ValueError: the shapes or bounds cannot be, or a score is NaN or infinite.
    """
    if not low < high:
        raise ValueError(f"low={low}, high={high}; set low < high, or no group can pass")
    groups = Groups(score_B, group_B)
    finite_B = score_B.isfinite()
    if not bool(finite_B.all()):
        # Every comparison with NaN is False: the group would be dropped without a word.
        i = int((~finite_B).nonzero()[0])
        raise ValueError(f"score_B[{i}] is {score_B[i].item()}, in group {int(group_B[i])}; give it a finite score")
    mean_B = groups.mean_B.float()
    # A score of 0.1 is the float32 number next to it, and so must a bound of 0.1 be.
    least, most = torch.tensor([low, high], dtype=torch.float32, device=mean_B.device)
    return (least < mean_B) & (mean_B < most)

"""Reward shaping by length and truncation, per-token rewards with a KL penalty, and the filter of dynamic sampling.

Shape suffixes: B sequences; N all tokens of a batch end to end. A group is the responses to one prompt.
"""

import torch
from torch import Tensor

from components.batch.ragged import Layout
from components.rl.advantages import Groups
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


def overlong_penalty(
    reward_B: Tensor, response_length_B: Tensor, max_length: int, buffer_length: int, factor: float
) -> Tensor:
    """Lower the reward of responses that come close to the maximum length, in proportion to the excess.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13 with factor 1: with exceed = min(length - (max_length
    - buffer_length), buffer_length), the reward is lowered by exceed / buffer_length * factor where exceed > 0.

    Args:
        reward_B: [B] reward of each response.
        response_length_B: [B] number of tokens of each response.
        max_length: maximum number of tokens of a response.
        buffer_length: the penalty starts this number of tokens before max_length, 1 to max_length.
        factor: penalty of a response of max_length tokens, at least 0.

    Returns:
        [B] float32.
    """
    check_sequences(reward_B, response_length_B=response_length_B)
    exceed_B = (response_length_B - (max_length - buffer_length)).clamp(0, buffer_length)
    return reward_B.float() - exceed_B.float() / buffer_length * factor


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


def groups_within(score_B: Tensor, group_B: Tensor, low: float, high: float) -> Tensor:
    """Return a mask of the responses whose group has a mean score between two bounds (dynamic sampling).

    In a group whose responses are all correct or all wrong, every advantage is 0, so it has no gradient.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2, equation 11: 0 < correct responses < all, which is
    low = 0 and high = 1. Use it with scores of the outcome: shaped rewards differ even in a group of correct responses.

    Args:
        score_B: [B] score of each response.
        group_B: [B] integer ids, equal for the responses to one prompt. Ids may be any integers in any order, and
            groups may differ in size.
        low: exclusive lower bound of the mean. Means and bounds are compared in float32, the dtype of scores.
        high: exclusive upper bound of the mean.

    Returns:
        [B] bool, the same for all responses of a group.

    Raises:
        ValueError: shapes differ, low is not below high, or a score is NaN or infinite.
    """
    if not low < high:
        raise ValueError(f"low={low}, high={high}; set low < high, or no group can pass")
    groups = Groups(score_B, group_B)
    finite_B = score_B.isfinite()
    if not bool(finite_B.all()):
        # Every comparison with NaN is False: the group would be dropped silently.
        i = int((~finite_B).nonzero()[0])
        raise ValueError(f"score_B[{i}] is {score_B[i].item()}, in group {int(group_B[i])}; give it a finite score")
    mean_B = groups.mean_B.float()
    # Scores are float32, so a bound of 0.1 must be rounded to float32 too. Otherwise a mean of 0.1 could pass it.
    least, most = torch.tensor([low, high], dtype=torch.float32, device=mean_B.device)
    return (least < mean_B) & (mean_B < most)

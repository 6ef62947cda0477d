"""Reward shaping by length and truncation, per-token rewards with a KL penalty, and the filter of dynamic sampling.

Shape suffixes: B sequences; N all tokens of a batch end to end. A group is the responses to one prompt.
"""

from torch import Tensor

from components.rl.masked import check_sequences


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

"""Losses of the value model, which predicts returns. Shape suffix: N all tokens of a micro-batch end to end."""

import torch
from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import check_columns, chosen


def clipped_value_loss(
    value_N: Tensor, old_value_N: Tensor, return_N: Tensor, action_mask_N: Tensor, *, clip: float
) -> TokenLoss:
    """Clipped value loss: half of max((value - return)^2, (clipped value - return)^2) for each token.

    The clipped value differs from the old value by at most `clip`.

    Source: the value loss of OpenAI's PPO2, as documented in Engstrom et al. 2020 (arXiv 2005.12729), section 3.

    Args:
        value_N: [N] current value of the state before each token. Gradients flow through it.
        old_value_N: [N] the value before the first update on these samples.
        return_N: [N] target of the value.
        action_mask_N: [N] bool. Entries outside the mask may have any value, including NaN.
        clip: maximum distance from the old value, in units of reward; inf for no limit.

    Returns:
        The loss of each token, and the metrics `clip_frac` (share of tokens with the loss of the clipped value),
        `value_mean` and `return_mean`.

    Raises:
        ValueError: shapes differ, or clip is not positive.
    """
    check_columns(action_mask_N, value_N=value_N, old_value_N=old_value_N, return_N=return_N)
    if not clip > 0:
        raise ValueError(f"clip={clip}: no value could move; set it above 0, inf for no limit")
    value_N, old_value_N, return_N = (
        chosen(action_mask_N, x_N) for x_N in (value_N, old_value_N.detach(), return_N.detach())
    )
    # Within the limits, clamp returns the value itself. old + (value - old) would differ by rounding and count as
    # clipped.
    clipped_N = value_N.clamp(old_value_N - clip, old_value_N + clip)
    square_N = (value_N - return_N).square()
    clipped_square_N = (clipped_N - return_N).square()
    metrics = {"clip_frac": clipped_square_N > square_N, "value_mean": value_N.detach(), "return_mean": return_N}
    return TokenLoss(0.5 * torch.maximum(square_N, clipped_square_N), metrics)

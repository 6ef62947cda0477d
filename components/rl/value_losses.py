"""Value losses: what is minimised to predict returns. N all tokens of a micro-batch end to end."""

import torch
from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import check_columns, chosen


def clipped_value_loss(
    value_N: Tensor, old_value_N: Tensor, return_N: Tensor, action_mask_N: Tensor, *, clip: float
) -> TokenLoss:
    """Half the squared error to the return, or that of the value kept within `clip` of the old one if it is larger.

    Source: the value loss of OpenAI's PPO2, as written down in Engstrom et al. 2020 (arXiv 2005.12729), section 3.

    Args:
        value_N: [N] value of the state before each token, now; the gradient flows through it.
        old_value_N: [N] the same before the first update on these samples.
        return_N: [N] what it should be.
        action_mask_N: [N] bool; entries outside may be anything, NaN too.
        clip: how far a value may move with effect, in units of reward; inf for no limit.

    Returns:
        Of each token the loss, and the metrics `clip_frac` of tokens where the kept value counted, `value_mean` and
        `return_mean`.
    """
    check_columns(action_mask_N, value_N=value_N, old_value_N=old_value_N, return_N=return_N)
    if not clip > 0:
        raise ValueError(f"clip={clip}: no value could move; set it above 0, inf for no limit")
    value_N, old_value_N, return_N = (
        chosen(action_mask_N, x_N) for x_N in (value_N, old_value_N.detach(), return_N.detach())
    )
    # Within the limits it is the value itself; old + (value - old) would differ by rounding, and count as clipped.
    kept_N = value_N.clamp(old_value_N - clip, old_value_N + clip)
    square_N = (value_N - return_N).square()
    kept_square_N = (kept_N - return_N).square()
    metrics = {
        "clip_frac": kept_square_N > square_N,
        "value_mean": value_N.detach(),
        "return_mean": return_N,
    }
    return TokenLoss(0.5 * torch.maximum(square_N, kept_square_N), metrics)

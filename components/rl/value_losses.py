"""Value losses: what is minimised to predict returns.

N all tokens of a batch end to end. Sums over the micro-batch divided by a count over the whole optimizer step.
"""

import torch
from torch import Tensor

from components.rl.masked import check_columns, token_mean
from components.rl.policy_losses import LossOutput


def clipped_value_loss(
    value_N: Tensor,
    old_value_N: Tensor,
    return_N: Tensor,
    action_mask_N: Tensor,
    total_tokens: float,
    clip: float,
) -> LossOutput:
    """Half the squared error to the return, or that of the value kept within `clip` of the old one if it is larger.

    Source: the value loss of OpenAI's PPO2, as written down in Engstrom et al. 2020 (arXiv 2005.12729), section 3.

    Args:
        value_N: [N] value of the state before each token, now; the gradient flows through it.
        old_value_N: [N] the same before the first update on these samples.
        return_N: [N] what it should be.
        action_mask_N: [N] bool; entries outside may be anything, NaN too.
        total_tokens: action tokens of the whole optimizer step, on all ranks.
        clip: how far a value may move with effect, in units of reward; inf for no limit.

    Returns:
        The loss, and the metrics `value_loss` (the loss again), `clipped_share` of tokens where the kept value counted,
        `value_mean` and `return_mean`.
    """
    check_columns(action_mask_N, value_N=value_N, old_value_N=old_value_N, return_N=return_N)
    if not clip > 0:
        raise ValueError(f"clip={clip}: no value could move; set it above 0, inf for no limit")
    # The inputs are selected, and not only the result: a NaN of what is masked must not reach the gradient either.
    value_N, old_value_N, return_N = (
        torch.where(action_mask_N, x_N.float(), 0.0) for x_N in (value_N, old_value_N.detach(), return_N.detach())
    )
    kept_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
    square_N = (value_N - return_N).square()
    kept_square_N = (kept_N - return_N).square()

    def mean(x_N: Tensor) -> Tensor:
        return token_mean(x_N, action_mask_N, total_tokens)

    loss = 0.5 * mean(torch.maximum(square_N, kept_square_N))
    with torch.no_grad():
        metrics = {
            "value_loss": loss.detach(),
            "clipped_share": mean(kept_square_N > square_N),
            "value_mean": mean(value_N),
            "return_mean": mean(return_N),
        }
    return LossOutput(loss=loss, metrics=metrics)

"""Parts that policy losses share: checked advantages, PPO's clipped surrogate, and metrics of the ratio."""

import torch
from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import check_columns, check_lengths, chosen


def clipped_surrogate(
    log_ratio_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """Return PPO's clipped surrogate; see `policy_losses.ppo_loss`."""
    ratio_N = log_ratio_N.exp()
    gain_N = ratio_N * advantage_N
    clipped_gain_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_N
    metrics = {"clip_frac": clipped_gain_N < gain_N, **distance_metrics(log_ratio_N, ratio_N)}
    gain_N = torch.minimum(gain_N, clipped_gain_N)
    # With a negative advantage the surrogate has no lower bound, so a single token with a large ratio could dominate
    # the step.
    if dual_clip is not None:
        bounded_N = (advantage_N < 0) & (gain_N < dual_clip * advantage_N)
        gain_N = torch.where(bounded_N, dual_clip * advantage_N, gain_N)
        metrics["dual_clip_frac"] = bounded_N
    return TokenLoss(-gain_N, metrics)


def checked_advantages(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    lengths_B: Tensor | None = None,
) -> Tensor:
    """Check the shapes, and return the advantages of action tokens with 0 elsewhere."""
    check_columns(action_mask_N, logprob_N=logprob_N, old_logprob_N=old_logprob_N, advantage_N=advantage_N)
    if lengths_B is not None:
        check_lengths(action_mask_N, lengths_B)
    return chosen(action_mask_N, advantage_N.detach())


def distance_metrics(log_ratio_N: Tensor, ratio_N: Tensor) -> dict[str, Tensor]:
    """Return the distance of the policy from the old one for each token."""
    own_N = log_ratio_N.detach()
    return {"ratio_mean": ratio_N.detach(), "approx_kl": torch.expm1(own_N) - own_N}

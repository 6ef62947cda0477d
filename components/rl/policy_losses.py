"""Policy losses: what is minimised to make good actions likelier.

N all tokens of a batch end to end. Every loss and metric is a sum over the micro-batch divided by a count over the
whole optimizer step, so that sums over micro-batches and ranks are means over the step.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from components.rl.masked import check_columns, token_mean

__all__ = ["LossOutput", "ppo_loss", "token_mean"]

_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a loss function returns for one micro-batch."""

    loss: Tensor
    """Scalar to minimise."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient, which add up over micro-batches and ranks as the loss does."""


def ppo_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    total_tokens: float,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """Clipped surrogate: gains from moving the probability ratio out of [1 - clip_low, 1 + clip_high] do not count.

    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; two separate bounds, and a mean over tokens rather
    than over sequences: Yu et al. 2025 (arXiv 2503.14476), sections 3.1 and 3.3.

    Args:
        logprob_N: [N] log-probability now, nats; the gradient flows through it.
        old_logprob_N: [N] the same before the first update on these samples.
        advantage_N: [N].
        action_mask_N: [N] bool; entries outside may be anything, NaN too.
        total_tokens: action tokens of the whole optimizer step, on all ranks.
        clip_low: the ratio is kept above 1 - clip_low, 0 to 1.
        clip_high: the ratio is kept below 1 + clip_high, at least 0.

    Returns:
        The loss, and the metrics `policy_loss` (the loss again), `clipped_share` of tokens whose gain was cut off,
        `ratio_mean`, and `approx_kl` (k3) from the old policy in nats, which is 0 only while every ratio is 1.
    """
    check_columns(action_mask_N, logprob_N=logprob_N, old_logprob_N=old_logprob_N, advantage_N=advantage_N)
    if not 0.0 <= clip_low <= 1.0 or clip_high < 0.0:
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}; set 0 <= clip_low <= 1 and clip_high >= 0")
    # The inputs are selected, and not only the result: a NaN of what is masked must not reach the gradient either.
    log_ratio_N = torch.where(action_mask_N, logprob_N.float() - old_logprob_N.float(), 0.0)
    log_ratio_N = log_ratio_N.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    advantage_N = torch.where(action_mask_N, advantage_N.detach().float(), 0.0)
    ratio_N = log_ratio_N.exp()
    gain_N = ratio_N * advantage_N
    clipped_gain_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_N

    def mean(x_N: Tensor) -> Tensor:
        return token_mean(x_N, action_mask_N, total_tokens)

    loss = mean(-torch.minimum(gain_N, clipped_gain_N))
    with torch.no_grad():
        metrics = {
            "policy_loss": loss.detach(),
            "clipped_share": mean(clipped_gain_N < gain_N),
            "ratio_mean": mean(ratio_N),
            "approx_kl": mean(torch.expm1(log_ratio_N) - log_ratio_N),
        }
    return LossOutput(loss=loss, metrics=metrics)

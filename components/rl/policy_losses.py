"""Policy losses: per-token losses whose minimisation increases the probability of good actions.

Shape suffixes: B sequences; N all tokens of a micro-batch end to end. Each function returns the loss [N] of every
token; `aggregation` reduces it to a scalar. Common arguments:

- `logprob_N`: [N] current log-probability in nats. Gradients flow only through it.
- `old_logprob_N`: [N] log-probability in nats before the first update on these samples.
- `advantage_N`: [N] advantage of each token.
- `action_mask_N`: [N] bool, True where the policy produced the token. Entries elsewhere may have any value, even NaN.

r = exp(logprob - old_logprob) is the ratio, with the log-ratio clamped to +-20. Metrics: `ratio_mean`; `approx_kl`, the
k3 estimate of the KL from the old policy in nats, which is 0 only while every token's ratio is 1; and `clip_frac`, the
share of tokens that a clip range changes. All functions raise a ValueError if shapes differ.
"""

from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import action_counts, chosen, log_ratio, sequence_sums, spread
from components.rl.surrogate import checked_advantages, clipped_surrogate, distance_metrics


def ppo_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Clipped surrogate of PPO: max(-r A, -clip(r, 1 - low, 1 + high) A).

    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; two separate bounds: Yu et al. 2025 (DAPO, arXiv
    2503.14476), equation 8; the dual clip: Ye et al. 2020 (arXiv 1912.09729), equation 5.

    Args:
        clip_low: the lower bound of the ratio is 1 - clip_low, 0 to 1.
        clip_high: the upper bound of the ratio is 1 + clip_high, at least 0.
        dual_clip: above 1: the loss of a token with a negative advantage is at most -dual_clip A, whatever its ratio.
            The metric `dual_clip_frac` is the share of tokens with that loss. None sets no such bound.
    """
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N)
    return clipped_surrogate(
        log_ratio(logprob_N, old_logprob_N, action_mask_N), advantage_N, clip_low, clip_high, dual_clip
    )


def gspo_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    action_mask_N: Tensor,
    lengths_B: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Clipped surrogate on the ratio of the response, which is the geometric mean of its tokens' ratios.

    Source: Zheng et al. 2025 (GSPO, arXiv 2507.18071), equation 14 (GSPO-token). Every token has the value of the
    response's ratio and the gradient of its own, so advantages may differ between tokens. With equal advantages and the
    aggregation seq-mean-token-mean it is equation 5.

    Args:
        lengths_B: [B] number of tokens in each sequence.
        clip_low: as in `ppo_loss`. The paper uses 3e-4.
        clip_high: as in `ppo_loss`. The paper uses 4e-4.
    """
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N, lengths_B)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    response_B = sequence_sums(own_N.detach(), lengths_B) / action_counts(action_mask_N, lengths_B)
    response_N = spread(response_B, lengths_B, len(own_N))
    # The difference is exactly 0; in another order it would round the response's ratio, whose clip range is narrow.
    log_ratio_N = chosen(action_mask_N, response_N) + (own_N - own_N.detach())
    loss = clipped_surrogate(log_ratio_N, advantage_N, clip_low, clip_high)
    # The ratio of a response may be 1 although the ratios of its tokens are far from 1.
    return TokenLoss(loss.loss_N, loss.metrics | distance_metrics(own_N, own_N.exp()))


def reinforce_loss(logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor) -> TokenLoss:
    """REINFORCE loss, -A log p.

    Use it with one update per batch of samples: nothing keeps the policy near the one that generated them.

    Source: Williams 1992, REINFORCE; with `advantages.gpg` it is the loss of GPG.
    """
    advantage_N = checked_advantages(logprob_N, logprob_N, advantage_N, action_mask_N)
    return TokenLoss(-advantage_N * chosen(action_mask_N, logprob_N))

"""Policy losses: what is minimised to make good actions likelier.

B sequences; N all tokens of a micro-batch end to end. Each function gives the loss of every token, [N]; `aggregation`
makes one number of it. `logprob_N` is the log-probability now, in nats, and the only thing that gradients flow through;
`old_logprob_N` is the same before the first update on these samples; `action_mask_N` is True where the policy produced
the token, and what is outside of it may be anything, NaN too. r = exp(logprob - old_logprob) is the ratio, with the
log-ratio kept within +-20. Metrics: `ratio_mean` and `approx_kl`, the k3 estimate of the KL from the old policy in
nats, which is 0 only while every token's ratio is 1; and `clip_frac` of tokens that a clip range changes.
"""

from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import (
    action_counts,
    check_columns,
    chosen,
    log_ratio,
    sequence_sums,
    spread,
)
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
    """Clipped surrogate, max(-r A, -clip(r, 1 - low, 1 + high) A): what the ratio gains outside does not count.

    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; two separate bounds: Yu et al. 2025 (DAPO, arXiv
    2503.14476), equation 8; the dual clip: Ye et al. 2020 (arXiv 1912.09729), equation 5.

    Args:
        clip_low: the ratio is kept above 1 - clip_low, 0 to 1.
        clip_high: the ratio is kept below 1 + clip_high, at least 0.
        dual_clip: more than 1: a token with a negative advantage costs at most -dual_clip A, however likely it has
            become. `dual_clip_frac` says on how many tokens. None: no such bound.
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
    """The clipped surrogate on the ratio of the whole response, the geometric mean of its tokens' ratios.

    Source: Zheng et al. 2025 (GSPO, arXiv 2507.18071), equation 14 (GSPO-token): every token has the response's ratio
    as its value and its own gradient, so tokens may differ in advantage. With equal advantages and the aggregation
    seq-mean-token-mean it is equation 5.

    Args:
        lengths_B: [B] tokens in each sequence.
        clip_low: as in `ppo_loss`; the paper has 3e-4.
        clip_high: as in `ppo_loss`; the paper has 4e-4.
    """
    advantage_N = checked_advantages(logprob_N, old_logprob_N, advantage_N, action_mask_N, lengths_B)
    own_N = log_ratio(logprob_N, old_logprob_N, action_mask_N)
    response_B = sequence_sums(own_N.detach(), lengths_B) / action_counts(action_mask_N, lengths_B)
    response_N = spread(response_B, lengths_B, len(own_N))
    # The difference is exactly 0; in another order it would round the response's ratio, whose clip range is narrow.
    log_ratio_N = chosen(action_mask_N, response_N) + (own_N - own_N.detach())
    loss = clipped_surrogate(log_ratio_N, advantage_N, clip_low, clip_high)
    # Of the responses the ratio may be 1 while their tokens are far from it.
    return TokenLoss(loss.loss_N, loss.metrics | distance_metrics(own_N, own_N.exp()))


def reinforce_loss(logprob_N: Tensor, advantage_N: Tensor, action_mask_N: Tensor) -> TokenLoss:
    """-A log p, for one update per batch of samples: nothing holds the policy near the one that made them.

    Source: Williams 1992, REINFORCE; with `advantages.gpg` it is the loss of GPG.
    """
    advantage_N = checked_advantages(logprob_N, logprob_N, advantage_N, action_mask_N)
    return TokenLoss(-advantage_N * chosen(action_mask_N, logprob_N))


def entropy_loss(entropy_N: Tensor, action_mask_N: Tensor) -> TokenLoss:
    """-H: to be added with a small weight, so that the policy keeps trying.

    Source: Williams and Peng 1991; Mnih et al. 2016 (A3C, arXiv 1602.01783), section 4.

    Args:
        entropy_N: [N] nats, of the distribution that each token was drawn from, with gradient.
    """
    check_columns(action_mask_N, entropy_N=entropy_N)
    entropy_N = chosen(action_mask_N, entropy_N)
    return TokenLoss(-entropy_N, {"entropy": entropy_N.detach()})

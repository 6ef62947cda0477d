"""Entropy bonus of the PPO recipes, as a loss. See `policy_losses` for the shape suffixes."""

from torch import Tensor

from components.rl.aggregation import TokenLoss
from components.rl.masked import check_columns, chosen


def entropy_loss(entropy_N: Tensor, action_mask_N: Tensor) -> TokenLoss:
    """Negative entropy, to be added to the loss with a small weight, so that the policy keeps exploring.

    Source: Williams and Peng 1991; Mnih et al. 2016 (A3C, arXiv 1602.01783), section 4.

    Args:
        entropy_N: [N] entropy of each token's distribution in nats, with gradient.
    """
    check_columns(action_mask_N, entropy_N=entropy_N)
    entropy_N = chosen(action_mask_N, entropy_N)
    return TokenLoss(-entropy_N, {"entropy": entropy_N.detach()})

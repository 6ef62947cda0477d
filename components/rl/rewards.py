"""From a reward per sequence to a reward per token.

B sequences; N all tokens of a batch end to end.
"""

import torch
from torch import Tensor

from components.ragged import Layout
from components.rl.masked import check_columns


def token_rewards(
    reward_B: Tensor, kl_N: Tensor | None, kl_coef: float, action_mask_N: Tensor, lengths_B: Tensor
) -> Tensor:
    """The KL penalty on every action token, and the sequence's reward on its last one.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), equation 2, with its KL taken token by token.

    Args:
        reward_B: [B] reward of each sequence. One without an action token earns nothing.
        kl_N: [N] KL estimate in nats; None when there is no reference. Read on action tokens only.
        kl_coef: reward per nat that is taken away.
        action_mask_N: [N] bool, True where the policy produced the token.
        lengths_B: [B] tokens in each sequence.

    Returns:
        [N] float32, 0 where the policy did not act.
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
    last_B = last_B.scatter_reduce(0, layout.sequence_ids[action], action, "amax")
    acts_B = last_B >= 0
    return reward_N.index_add(0, last_B[acts_B], reward_B.float()[acts_B])

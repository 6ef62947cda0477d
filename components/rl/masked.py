"""What all of the maths does with masks and sequences: check them, choose, sum, and carry along a sequence.

B sequences; N all tokens of a batch end to end. Nothing here multiplies by a mask: NaN * 0 is NaN, so what does not
count is replaced before it is used, and its gradient is 0.
"""

import torch
from torch import Tensor

from components.batch.ragged import Layout, repeated

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are kept within +- this many nats: e^20 is far outside every clip range, and a float32 can still square
it; without a limit exp would overflow, and inf * 0 in the backward pass is NaN."""

_BLOCK = 64


def check_columns(mask_N: Tensor, **columns: Tensor) -> None:
    """ValueError unless the mask is a bool [N] and all columns are [N].

    Without it [N] against [N, 1] would broadcast to [N, N], and train on nonsense without a word.
    """
    if mask_N.dtype != torch.bool or mask_N.dim() != 1:
        raise ValueError(f"the mask must be a bool [N], but is {mask_N.dtype} of shape {list(mask_N.shape)}")
    for name, x_N in columns.items():
        if x_N.shape != mask_N.shape:
            raise ValueError(f"{name} has shape {list(x_N.shape)}, the mask {list(mask_N.shape)}; both must be [N]")


def check_lengths(mask_N: Tensor, lengths_B: Tensor) -> None:
    """ValueError unless the sequences are as many tokens together as the mask has."""
    total = Layout(lengths_B).num_tokens
    if total != len(mask_N):
        raise ValueError(f"lengths_B sum to {total} tokens, but the columns have {len(mask_N)}")


def check_sequences(reward_B: Tensor, **columns: Tensor) -> None:
    """ValueError unless the reward and all columns are [B]."""
    for name, x_B in columns.items():
        if reward_B.dim() != 1 or x_B.shape != reward_B.shape:
            raise ValueError(f"reward_B has shape {list(reward_B.shape)}, {name} {list(x_B.shape)}; both must be [B]")


def chosen(mask_N: Tensor, x_N: Tensor) -> Tensor:
    """[N] float32: x where the mask is True, 0 elsewhere, whatever stood there; gradients flow where it is True."""
    return torch.where(mask_N, x_N.float(), 0.0)


def log_ratio(logprob_N: Tensor, old_logprob_N: Tensor, mask_N: Tensor) -> Tensor:
    """[N] log p - log p_old in nats, within +- `LOG_RATIO_LIMIT`, and 0 outside the mask."""
    own_N = chosen(mask_N, logprob_N.float() - old_logprob_N.detach().float())
    limits = (-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return own_N.clamp(*limits) if own_N.requires_grad else own_N.clamp_(*limits)


def token_mean(x_N: Tensor, mask_N: Tensor, total_tokens: float) -> Tensor:
    """Sum of x over the masked tokens, divided by a count that is given: this micro-batch's part of a mean.

    Divided by the count of the whole optimizer step over all ranks, the parts add up to the mean over the step,
    however it was cut.

    Args:
        x_N: [N]; entries outside the mask may be anything, NaN too.
        mask_N: [N] bool.
        total_tokens: masked tokens of the whole optimizer step, on all ranks.

    Raises:
        ValueError: the shapes differ, the mask is not bool, or total_tokens is not positive.
    """
    check_columns(mask_N, x_N=x_N)
    if not total_tokens > 0:
        raise ValueError(f"total_tokens={total_tokens}: a step that trains on no token has no mean; drop it")
    return chosen(mask_N, x_N).sum() / total_tokens


def sequence_sums(x_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B] sum of each sequence's tokens, bools counted; 0 for one without tokens. A NaN stays in its own sequence."""
    dtype = torch.float32 if x_N.dtype == torch.bool else x_N.dtype
    if not len(lengths_B):  # which torch takes for an error
        return x_N.to(dtype)
    # In float64: one after the other in float32, 100,000 numbers lose the fourth digit of their sum.
    return torch.segment_reduce(x_N.double(), "sum", lengths=lengths_B.to(torch.int64), initial=0).to(dtype)


def sequence_means(x_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B] mean over each sequence's masked tokens; 0 where there are none."""
    return sequence_sums(chosen(mask_N, x_N), lengths_B) / action_counts(mask_N, lengths_B)


def action_counts(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B] float32: each sequence's masked tokens, and 1 where there are none, to divide by."""
    return sequence_sums(mask_N, lengths_B).clamp(min=1.0)


def spread(x_B: Tensor, lengths_B: Tensor, num_tokens: int) -> Tensor:
    """[N] each sequence's number at every one of its tokens."""
    if not x_B.requires_grad:
        return repeated(x_B, lengths_B, num_tokens)
    return x_B.index_select(0, repeated(torch.arange(len(x_B), device=x_B.device), lengths_B, num_tokens))


def carried_back(x_N: Tensor, carry_N: Tensor) -> Tensor:
    """[N] y_t = x_t + carry_t * y_{t+1}, where a carry of 0 ends a sequence, and nothing comes after the last token.

    The recurrence of returns and advantages, for all sequences at once and without padding: blocks of adjacent tokens
    are solved side by side as if nothing followed them, and then each takes over what the block behind it brings.
    """
    width = min(_BLOCK, len(x_N))
    pad = -len(x_N) % width if width else 0
    # Side by side: what stands at the same place of all blocks is one contiguous row. They are written into, so they
    # have to be copies, which contiguous() does not make of a single block.
    y_KR, carry_KR = (
        _padded(v_N, pad).view(-1, max(width, 1)).t().clone(memory_format=torch.contiguous_format)
        for v_N in (x_N, carry_N)
    )
    for place in range(width - 1, 0, -1):
        _hand_on(y_KR[place], carry_KR[place - 1], y_KR[place - 1])
        carry_KR[place - 1] *= carry_KR[place]
    if y_KR.shape[1] > 1:
        # The first response of a block is linear in that of the block behind it: the same recurrence, over blocks.
        first_R = carried_back(y_KR[0], carry_KR[0])
        _hand_on(torch.cat([first_R[1:], first_R.new_zeros(1)]), carry_KR, y_KR)
    return y_KR.t().reshape(-1)[: len(x_N)]


def _hand_on(behind: Tensor, carry: Tensor, y: Tensor) -> None:
    """Add carry * behind to y in its place."""
    # 0 * NaN is NaN: what stands behind the end of a sequence must not reach into it.
    y.addcmul_(carry, torch.where(carry == 0, 0.0, behind))


def _padded(x_N: Tensor, pad: int) -> Tensor:
    return torch.nn.functional.pad(x_N, (0, pad)) if pad else x_N

"""Recurrence of returns and advantages over the tokens of all sequences at once.

N: all tokens of a batch end to end.
"""

import torch
from torch import Tensor

_BLOCK = 64
"""Number of adjacent tokens in a block of `carried_back`."""


def carried_back(x_N: Tensor, carry_N: Tensor) -> Tensor:
    """Solve y_t = x_t + carry_t * y_{t+1} [N], with 0 after the last token.

    This is the recurrence of returns and advantages, for all sequences at once and without padding. A carry of 0 ends a
    sequence. K tokens form a block, and there are R blocks. All blocks are solved in parallel as if nothing followed
    them; then the contribution of the next block is added to each.
    """
    width = max(min(_BLOCK, len(x_N)), 1)
    pad = -len(x_N) % width
    y_KR = _in_blocks(x_N, width, pad)
    carry_KR = _in_blocks(carry_N, width, pad)
    for k in range(width - 1, 0, -1):
        _add_carried(y_KR[k], carry_KR[k - 1], y_KR[k - 1])
        carry_KR[k - 1] *= carry_KR[k]
    if y_KR.shape[1] > 1:
        # The first value of a block is linear in the first value of the next block: the same recurrence, over blocks.
        first_R = carried_back(y_KR[0], carry_KR[0])
        _add_carried(torch.cat([first_R[1:], first_R.new_zeros(1)]), carry_KR, y_KR)
    return y_KR.t().reshape(-1)[: len(x_N)]


def _add_carried(next_y: Tensor, carry: Tensor, y: Tensor) -> None:
    """Add carry * next_y to y in place."""
    # 0 * NaN is NaN: a NaN after the end of a sequence must not reach into it.
    y.addcmul_(carry, torch.where(carry == 0, 0.0, next_y))


def _in_blocks(x_N: Tensor, width: int, pad: int) -> Tensor:
    """Return a contiguous copy [K, R] of x, padded with zeros, with one block per column."""
    if pad:
        x_N = torch.nn.functional.pad(x_N, (0, pad))
    # The k-th tokens of all blocks are one contiguous row. The result is written into, so it must be a copy;
    # contiguous() does not copy a single block.
    return x_N.view(-1, width).t().clone(memory_format=torch.contiguous_format)

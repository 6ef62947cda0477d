"""What all of the maths does with masks: check them, and average over them.

N all tokens of a batch end to end.
"""

import torch
from torch import Tensor


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
    # NaN * 0 is NaN: select, do not multiply.
    return torch.where(mask_N, x_N.float(), 0.0).sum() / total_tokens


def check_columns(mask_N: Tensor, **columns: Tensor) -> None:
    """ValueError unless the mask is a bool [N] and all columns are [N].

    Without it [N] against [N, 1] would broadcast to [N, N], and train on nonsense without a word.
    """
    if mask_N.dtype != torch.bool or mask_N.dim() != 1:
        raise ValueError(f"the mask must be a bool [N], but is {mask_N.dtype} of shape {list(mask_N.shape)}")
    for name, x_N in columns.items():
        if x_N.shape != mask_N.shape:
            raise ValueError(f"{name} has shape {list(x_N.shape)}, the mask {list(mask_N.shape)}; both must be [N]")

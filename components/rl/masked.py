"""Masked operations on ragged batches: checks, selection, sums, and recurrences along a sequence.

Shape suffixes: B sequences; N all tokens of a batch end to end.

No function multiplies by a mask, because NaN * 0 is NaN. Entries outside the mask are replaced before they are used, so
their gradient is 0.
"""

import torch
from torch import Tensor

from components.batch.ragged import Layout, repeated

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this many nats. e^20 is far outside every clip range, and its square still fits float32.
Without a limit exp would overflow, and inf * 0 in the backward pass is NaN."""


def check_columns(mask_N: Tensor, **columns: Tensor) -> None:
    """Raise a ValueError unless the mask is a bool [N] and all columns are [N].

    Without this check, [N] and [N, 1] would silently broadcast to [N, N].
    """
    if mask_N.dtype != torch.bool or mask_N.dim() != 1:
        raise ValueError(f"the mask must be a bool [N], but is {mask_N.dtype} of shape {list(mask_N.shape)}")
    for name, x_N in columns.items():
        if x_N.shape != mask_N.shape:
            raise ValueError(f"{name} has shape {list(x_N.shape)}, the mask {list(mask_N.shape)}; both must be [N]")


def check_lengths(mask_N: Tensor, lengths_B: Tensor) -> None:
    """Raise a ValueError unless the lengths sum to the number of tokens of the mask. On a GPU nothing is checked."""
    # Reading the sum would make the host wait for the GPU. A batch checks its lengths before it is sent there.
    if lengths_B.device.type != "cpu":
        return
    total = Layout(lengths_B).num_tokens
    if total != len(mask_N):
        raise ValueError(f"lengths_B sum to {total} tokens, but the columns have {len(mask_N)}")


def check_sequences(reward_B: Tensor, **columns: Tensor) -> None:
    """Raise a ValueError unless the reward and all columns are [B]."""
    for name, x_B in columns.items():
        if reward_B.dim() != 1 or x_B.shape != reward_B.shape:
            raise ValueError(f"reward_B has shape {list(reward_B.shape)}, {name} {list(x_B.shape)}; both must be [B]")


def chosen(mask_N: Tensor, x_N: Tensor) -> Tensor:
    """Return x [N] in float32 with 0 outside the mask, also where x is NaN. Gradients flow only inside the mask."""
    return torch.where(mask_N, x_N.float(), 0.0)


def log_ratio(logprob_N: Tensor, old_logprob_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return log p - log p_old [N] in nats, clamped to +- `LOG_RATIO_LIMIT`, and 0 outside the mask."""
    log_ratio_N = chosen(mask_N, logprob_N.float() - old_logprob_N.detach().float())
    if log_ratio_N.requires_grad:
        return log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # In place without autograd: it saves a copy of the column.
    return log_ratio_N.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_mean(x_N: Tensor, mask_N: Tensor, total_tokens: float) -> Tensor:
    """Return the micro-batch's contribution to a mean: the sum of x over masked tokens, divided by `total_tokens`.

    With the count of the complete optimizer step over all ranks as `total_tokens`, the contributions of all
    micro-batches sum to the mean over the step.

    Args:
        x_N: [N] values. Entries outside the mask may have any value, including NaN.
        mask_N: [N] bool.
        total_tokens: number of masked tokens of the complete optimizer step, on all ranks.

    Raises:
        ValueError: the shapes differ, the mask is not bool, or total_tokens is not positive.
    """
    check_columns(mask_N, x_N=x_N)
    if not total_tokens > 0:
        raise ValueError(f"total_tokens={total_tokens}: a step that trains on no token has no mean; drop it")
    return chosen(mask_N, x_N).sum() / total_tokens


def sequence_sums(x_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the sum [B] over each sequence's tokens. Bools are counted as float32.

    The sum of an empty sequence is 0. A NaN affects only its own sequence.
    """
    dtype = torch.float32 if x_N.dtype == torch.bool else x_N.dtype
    if not len(lengths_B):  # segment_reduce raises an error without a segment
        return x_N.to(dtype)
    # In float64: summed in sequence in float32, 100,000 numbers lose the fourth digit of their sum.
    is_trusted = lengths_B.device.type != "cpu"  # the check would make the host wait, as in `check_lengths`
    lengths_B = lengths_B.to(torch.int64)
    return torch.segment_reduce(x_N.double(), "sum", lengths=lengths_B, initial=0, unsafe=is_trusted).to(dtype)


def sequence_means(x_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the mean [B] over each sequence's masked tokens; 0 for a sequence without one."""
    return sequence_sums(chosen(mask_N, x_N), lengths_B) / action_counts(mask_N, lengths_B)


def action_counts(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the number [B] of each sequence's masked tokens in float32, at least 1, as a denominator."""
    return sequence_sums(mask_N, lengths_B).clamp(min=1.0)


def spread(x_B: Tensor, lengths_B: Tensor, num_tokens: int) -> Tensor:
    """Return each sequence's value at every one of its tokens [N]."""
    if not x_B.requires_grad:
        return repeated(x_B, lengths_B, num_tokens)
    # `repeated` goes through numpy on the CPU, which would cut the gradient. index_select is differentiable.
    return x_B.index_select(0, repeated(torch.arange(len(x_B), device=x_B.device), lengths_B, num_tokens))

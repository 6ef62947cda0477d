"""Aggregation of per-token losses to the scalar that is minimised.

Shape suffixes: B sequences; N all tokens of a micro-batch end to end.

Every result is a sum over the micro-batch divided by a count over the complete optimizer step on all ranks. Summed over
micro-batches and ranks, the results are means over the step. The number of micro-batches and ranks therefore does not
change the loss.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.masked import check_columns, check_lengths, chosen, sequence_means, sequence_sums, token_mean

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
"""Weighting of tokens and sequences in the loss, with verl's names; see `aggregate`."""


@dataclass(frozen=True)
class Totals:
    """Denominators of the losses: counts over the complete optimizer step, on all ranks."""

    tokens: int
    """Number of tokens that are trained on."""
    sequences: int
    """Number of sequences with at least one such token."""
    rows: int = 0
    """Number of all sequences, including those without such a token."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Result of a loss function: one value per token of a micro-batch."""

    loss_N: Tensor
    """[N] loss of each token, 0 where the policy did not act."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Numbers or bools without gradient, each [N]. Their mean over the tokens of the step is logged."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Contribution of one micro-batch to the loss of the optimizer step."""

    loss: Tensor
    """Scalar to minimise."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient. Like the loss, they are summed over micro-batches and ranks."""


def aggregate(
    x_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    totals: Totals,
    aggregation: Aggregation = "token-mean",
    max_length: int | None = None,
) -> Tensor:
    """Return the micro-batch's contribution to the mean of x over an optimizer step.

    - `token-mean`: sum over tokens / tokens of the step. Every token has the same weight (Yu et al. 2025, DAPO, arXiv
      2503.14476, section 3.3).
    - `token-sum`: sum over the tokens of the step, without a division. It grows with the batch size.
    - `seq-mean-token-mean`: mean over a sequence's tokens, then over sequences. Every sequence has the same weight, so
      a token of a long sequence has less (Shao et al. 2024, GRPO, arXiv 2402.03300, equation 3).
    - `seq-mean-token-sum`: sum over a sequence's tokens, then the mean over sequences.
    - `seq-mean-token-sum-norm`: the previous one divided by the constant `max_length` (Liu et al. 2025, Dr. GRPO, arXiv
      2503.20783, section 3.2). Without a constant verl divides by the longest row of the batch, which depends on the
      padding.

    Sequences without an action token are not counted in any of these means.

    Args:
        x_N: [N] values. Entries outside the mask may have any value, including NaN.
        mask_N: [N] bool, True where the policy produced the token.
        lengths_B: [B] number of tokens in each sequence.
        totals: counts over the complete optimizer step, on all ranks.
        aggregation: one of the five names above.
        max_length: maximum number of tokens of a response. Required by `seq-mean-token-sum-norm`, ignored otherwise.

    Raises:
        ValueError: shapes differ, a total is not positive, `max_length` is missing, or the aggregation is unknown.
    """
    if aggregation == "token-mean":
        return token_mean(x_N, mask_N, totals.tokens)
    if aggregation == "token-sum":
        return token_mean(x_N, mask_N, 1.0)
    check_columns(mask_N, x_N=x_N)
    check_lengths(mask_N, lengths_B)
    if totals.sequences < 1:
        raise ValueError(f"totals.sequences={totals.sequences}: a step without a sequence has no mean; drop it")
    if aggregation == "seq-mean-token-mean":
        return sequence_means(x_N, mask_N, lengths_B).sum() / totals.sequences
    total = sequence_sums(chosen(mask_N, x_N), lengths_B).sum() / totals.sequences
    if aggregation == "seq-mean-token-sum":
        return total
    if aggregation != "seq-mean-token-sum-norm":
        raise ValueError(f"aggregation={aggregation!r} is unknown; set one of {', '.join(get_args(Aggregation))}")
    if max_length is None or max_length < 1:
        raise ValueError(f"seq-mean-token-sum-norm divides by max_length={max_length}; set the maximum response length")
    return total / max_length


def reduce_loss(
    token_loss: TokenLoss,
    mask_N: Tensor,
    lengths_B: Tensor,
    totals: Totals,
    aggregation: Aggregation = "token-mean",
    max_length: int | None = None,
    weight_N: Tensor | None = None,
) -> LossOutput:
    """Return the micro-batch's contribution to the loss, and to the means of its metrics over tokens.

    Args:
        token_loss: loss and metrics of each token.
        mask_N: [N] bool, as in `aggregate`, like all arguments that are not listed here.
        weight_N: [N] factor of each token's loss, without gradient, for example from `correction`. It changes neither
            the denominators nor the metrics.

    Raises:
        ValueError: as in `aggregate`, or the weights or a metric are not [N].
    """
    loss_N = token_loss.loss_N
    if weight_N is not None:
        check_columns(mask_N, weight_N=weight_N)
        loss_N = loss_N * chosen(mask_N, weight_N.detach())
    loss = aggregate(loss_N, mask_N, lengths_B, totals, aggregation, max_length)
    with torch.no_grad():
        # A bool metric is False where the loss is NaN, so the NaN would not show. Adding 0.0 * NaN makes it NaN too.
        nan_or_zero = 0.0 * loss
        metrics = {name: token_mean(x_N, mask_N, totals.tokens) for name, x_N in token_loss.metrics.items()}
        metrics = {name: mean + nan_or_zero for name, mean in metrics.items()}
    return LossOutput(loss=loss, metrics=metrics)

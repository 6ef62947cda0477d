"""From what each token costs to the number that is minimised.

B sequences; N all tokens of a micro-batch end to end. Everything is a sum over the micro-batch divided by a count over
the whole optimizer step on all ranks, so that sums over micro-batches and ranks are means over the step: where a batch
is cut, and by how many ranks, changes nothing.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.masked import check_columns, check_lengths, chosen, sequence_means, sequence_sums, token_mean

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
"""How tokens are weighed against each other, by verl's names."""


@dataclass(frozen=True)
class Totals:
    """What losses are divided by: counts over the whole optimizer step, on all ranks."""

    tokens: int
    """Tokens that are trained on."""
    sequences: int
    """Sequences that have such a token."""
    rows: int = 0
    """All sequences, those without such a token too."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What a loss function gives for each token of a micro-batch."""

    loss_N: Tensor
    """[N] what is minimised, 0 where the policy did not act."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Each [N] without gradient, numbers or bools; their mean over the tokens of the step is logged."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A micro-batch's part of the step's loss."""

    loss: Tensor
    """Scalar to minimise."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient, which add up over micro-batches and ranks as the loss does."""


def aggregate(
    x_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    totals: Totals,
    aggregation: Aggregation = "token-mean",
    max_length: int | None = None,
) -> Tensor:
    """This micro-batch's part of the mean of x over an optimizer step.

    - `token-mean`: sum over tokens / tokens of the step. Each token counts the same (Yu et al. 2025, DAPO, arXiv
      2503.14476, section 3.3).
    - `token-sum`: the sum over tokens of the step, not divided; its size is that of the batch.
    - `seq-mean-token-mean`: the mean over a sequence's tokens, then over sequences; each sequence counts the same, a
      token of a long one less (Shao et al. 2024, GRPO, arXiv 2402.03300, equation 3).
    - `seq-mean-token-sum`: the sum over a sequence's tokens, then the mean over sequences.
    - `seq-mean-token-sum-norm`: that divided by a constant, `max_length` (Liu et al. 2025, Dr. GRPO, arXiv 2503.20783,
      section 3.2). verl takes the longest row of the batch where none is given, which then depends on its padding.

    A sequence in which the policy never acted is no sequence of any of these means.

    Args:
        x_N: [N]; entries outside the mask may be anything, NaN too.
        mask_N: [N] bool, True where the policy produced the token.
        lengths_B: [B] tokens in each sequence.
        totals: of the whole optimizer step, on all ranks.
        aggregation: one of the five.
        max_length: tokens that a response may have; only read, and then needed, by the last one.

    Raises:
        ValueError: shapes differ, a total is not positive, `max_length` is missing, or the name is none of the five.
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
        raise ValueError(
            f"seq-mean-token-sum-norm divides by max_length={max_length}; set the longest response's tokens"
        )
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
    """This micro-batch's part of a loss, and of the means of its metrics over tokens.

    Args:
        token_loss: of each token.
        mask_N: [N] bool, as in `aggregate`, like what is not named here.
        weight_N: [N] without gradient, times which the loss of each token counts, such as `correction` gives it; the
            counts that are divided by stay as they are, and so do the metrics.

    Raises:
        ValueError: as in `aggregate`, or the weights or a metric are not [N].
    """
    loss_N = token_loss.loss_N
    if weight_N is not None:
        check_columns(mask_N, weight_N=weight_N)
        loss_N = loss_N * chosen(mask_N, weight_N.detach())
    loss = aggregate(loss_N, mask_N, lengths_B, totals, aggregation, max_length)
    with torch.no_grad():
        # A share of tokens counts a NaN as a no; the 0 * NaN says that there is one.
        flaw = 0.0 * loss
        metrics = {name: token_mean(x_N, mask_N, totals.tokens) + flaw for name, x_N in token_loss.metrics.items()}
    return LossOutput(loss=loss, metrics=metrics)

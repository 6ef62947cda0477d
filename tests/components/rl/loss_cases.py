"""Random steps of ragged sequences, and every loss as a function of a step.

Legend: B sequences; N all tokens of a step end to end. A step is a `Batch` with the per-token columns `x` (trained: the
log-probability or the value), `old` (before the update, or of the reference), `advantage` (or the return), `mask`, and
`dropped` and `held`, the tokens that Clip-Cov and KL-Cov select over the whole step.
"""

from collections.abc import Callable
from typing import get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from components.batch import Batch
from components.rl.aggregation import Aggregation, LossOutput, TokenLoss, Totals, reduce_loss
from components.rl.covariance_losses import clip_cov_loss, clip_cov_tokens, covariances, kl_cov_loss, kl_cov_tokens
from components.rl.kl import KLKind, kl_estimate
from components.rl.policy_losses import gspo_loss, ppo_loss, reinforce_loss
from components.rl.ratio_losses import cispo_loss, dppo_loss, dro_loss, geo_mean_loss, sapo_loss
from components.rl.value_losses import clipped_value_loss

Loss = Callable[[Tensor, Batch], TokenLoss]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
KINDS = ("usual", "equal advantages", "zeros", "extreme")
MAX_LENGTH = 7


def _kl(kind: KLKind) -> Loss:
    return lambda x_N, step: TokenLoss(kl_estimate(x_N, step["old"], step["mask"], kind))


LOSSES: dict[str, Loss] = {
    "ppo": lambda x_N, step: ppo_loss(x_N, *columns(step), clip_low=0.2, clip_high=0.28),
    "dual": lambda x_N, step: ppo_loss(x_N, *columns(step), clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    "gspo": lambda x_N, step: gspo_loss(x_N, *columns(step), step.lengths, clip_low=0.1, clip_high=0.2),
    "geo_mean": lambda x_N, step: geo_mean_loss(x_N, *columns(step), step.lengths, clip_low=0.3, clip_high=0.4),
    "cispo": lambda x_N, step: cispo_loss(x_N, *columns(step), clip_low=0.5, clip_high=0.28),
    "sapo": lambda x_N, step: sapo_loss(x_N, *columns(step), tau_positive=1.0, tau_negative=2.0),
    "dppo tv": lambda x_N, step: dppo_loss(x_N, *columns(step), divergence="tv", clip_low=0.1, clip_high=0.2),
    "dppo kl": lambda x_N, step: dppo_loss(
        x_N, *columns(step), divergence="kl", clip_low=0.05, clip_high=0.07, ratio_cap=2.0
    ),
    "dro": lambda x_N, step: dro_loss(x_N, *columns(step), beta=0.5),
    "reinforce": lambda x_N, step: reinforce_loss(x_N, step["advantage"], step["mask"]),
    "clip_cov": lambda x_N, step: clip_cov_loss(x_N, *columns(step), step["dropped"], clip_low=0.2, clip_high=0.28),
    "kl_cov": lambda x_N, step: kl_cov_loss(x_N, *columns(step), step["held"], coef=0.5),
    "value": lambda x_N, step: clipped_value_loss(x_N, *columns(step), clip=0.7),
    **{kind: _kl(kind) for kind in ("k1", "k2", "k3", "k3+")},
}


def columns(step: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return step["old"], step["advantage"], step["mask"]


def make_step(lengths: list[int], seed: int, kind: str = "usual", acting: float = 0.7) -> Batch:
    """Strategy for a step whose numbers are multiples of 1/16, which float32 represents exactly. No ratio is within
    rounding of a bound.
    """
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (size,), generator=generator).float()

    old_N = integers(-60, 0) / 16
    x_N = torch.minimum(old_N + integers(-28, 28) / 16 * (integers(0, 5) > 0), torch.zeros(size))
    advantage_N = integers(-16, 16) / 8
    if kind == "equal advantages":
        advantage_N = torch.full((size,), -1.5 if seed % 2 else 0.75)
    if kind == "zeros":
        advantage_N = torch.zeros(size)
        x_N = torch.where(integers(0, 1) > 0, x_N, old_N)
    if kind == "extreme":
        far_N = integers(0, 4) == 0
        side_N = integers(0, 1) > 0
        x_N = torch.where(far_N, torch.where(side_N, 0.0, -1e4), x_N)
        old_N = torch.where(far_N, torch.where(side_N, -1e4, 0.0), old_N)
    mask_N = torch.rand(size, generator=generator) < acting
    covariance_N = covariances(old_N, advantage_N, mask_N)
    uniform_N = torch.rand(size, generator=generator)
    return Batch(
        torch.tensor(lengths, dtype=torch.int64),
        {
            "x": x_N,
            "old": old_N,
            "advantage": advantage_N,
            "mask": mask_N,
            "dropped": clip_cov_tokens(covariance_N, mask_N, uniform_N, share=0.2, low=0.1, high=2.0),
            "held": kl_cov_tokens(covariance_N, mask_N, share=0.2),
        },
    )


def steps(*kinds: str) -> st.SearchStrategy[Batch]:
    """Strategy for up to four sequences of 1 to 40 tokens, with gaps in the mask or without action tokens."""
    lengths = st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=4)
    acting = st.sampled_from([0.7, 1.0, 0.2, 0.0])
    return st.builds(make_step, lengths, st.integers(0, 10**6), st.sampled_from(kinds or KINDS), acting)


def totals_of(step: Batch) -> Totals:
    """Return the counts of a complete step, at least 1 each."""
    acting = [bool(step.row(i, "mask").any()) for i in range(len(step))]
    return Totals(tokens=max(int(step["mask"].sum()), 1), sequences=max(sum(acting), 1))


def reduced(loss: Loss, x_N: Tensor, step: Batch, totals: Totals) -> dict[Aggregation, LossOutput]:
    """Return the loss with each aggregation. Metrics do not depend on the aggregation and are in the first result."""
    token_loss = loss(x_N, step)
    outputs: dict[Aggregation, LossOutput] = {}
    for name in AGGREGATIONS:
        outputs[name] = reduce_loss(token_loss, step["mask"], step.lengths, totals, name, MAX_LENGTH)
        token_loss = TokenLoss(token_loss.loss_N)
    return outputs

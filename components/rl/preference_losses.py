"""Preference losses: losses that rank the better of two responses first.

Shape suffix: P pairs of a micro-batch. As in `aggregation`, every result is a sum over the micro-batch divided by the
number of pairs of the complete optimizer step.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from components.rl.aggregation import LossOutput


def bradley_terry_loss(
    chosen_P: Tensor, rejected_P: Tensor, total_pairs: float, margin_P: Tensor | None = None
) -> LossOutput:
    """Bradley-Terry loss, -log sigmoid(chosen - rejected - margin).

    It is the negative log-likelihood that the chosen response wins, with rewards as log-odds of winning.

    Source: Ouyang et al. 2022, arXiv 2203.02155, equation 1; the margin: Touvron et al. 2023, arXiv 2307.09288,
    equation 2.

    Args:
        chosen_P: [P] rewards of the chosen responses.
        rejected_P: [P] rewards of the rejected responses.
        total_pairs: number of pairs of the complete optimizer step, on all ranks.
        margin_P: [P] minimum difference between the two rewards; None means 0.

    Returns:
        The loss, and means over the pairs as metrics: `accuracy` (share of pairs that are ranked correctly; a tie
        counts half), `chosen_reward`, `rejected_reward` and `margin`.

    Raises:
        ValueError: shapes differ, or total_pairs is not positive.
    """
    _check("chosen_P", chosen_P, total_pairs, rejected_P=rejected_P)
    gap_P = chosen_P.float() - rejected_P.float()
    metrics = {"accuracy": _wins(gap_P), **_rewards(chosen_P, rejected_P)}
    if margin_P is not None:
        _check("chosen_P", chosen_P, total_pairs, margin_P=margin_P)
        gap_P = gap_P - margin_P
    return _mean(-logsigmoid(gap_P), total_pairs, metrics)


def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    total_pairs: float,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    ipo: bool = False,
) -> LossOutput:
    """Direct preference optimisation (DPO), conservative DPO, or IPO.

    The implicit reward of a response is beta times its log-ratio to the reference. With z the log-ratio of the chosen
    response minus that of the rejected one:

    - DPO: -(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z) with e = label_smoothing (Rafailov et al. 2023, arXiv
      2305.18290, equation 7). With e > 0 it is conservative DPO (Mitchell 2023), which assumes that a share e of the
      labels is wrong.
    - IPO: (z - 1 / (2 beta))^2 (Azar et al. 2023, arXiv 2310.12036, equation 17). Log-ratios are sums over the
      response, as in the paper. Some libraries use means.

    Args:
        chosen_P: [P] log-probability of the chosen response in nats, summed over its tokens.
        rejected_P: [P] log-probability of the rejected response in nats.
        reference_chosen_P: [P] log-probability of the chosen response under the reference. No gradient flows.
        reference_rejected_P: [P] log-probability of the rejected response under the reference. No gradient flows.
        total_pairs: number of pairs of the complete optimizer step, on all ranks.
        beta: strength of the penalty for leaving the reference, above 0.
        label_smoothing: share of labels that are assumed to be wrong, from 0 to below 0.5.
        ipo: use IPO instead of DPO.

    Returns:
        The loss, and the metrics `accuracy`, `chosen_reward`, `rejected_reward` and `margin` of the implicit rewards.

    Raises:
        ValueError: shapes differ, or total_pairs is not positive.
    """
    references = {"reference_chosen_P": reference_chosen_P, "reference_rejected_P": reference_rejected_P}
    _check("chosen_P", chosen_P, total_pairs, rejected_P=rejected_P, **references)
    chosen_ratio_P = chosen_P.float() - reference_chosen_P.detach()
    rejected_ratio_P = rejected_P.float() - reference_rejected_P.detach()
    gap_P = chosen_ratio_P - rejected_ratio_P
    if ipo:
        loss_P = (gap_P - 1 / (2 * beta)).square()
    else:
        logp_correct_P = logsigmoid(beta * gap_P)
        logp_flipped_P = logsigmoid(-beta * gap_P)
        loss_P = -(1 - label_smoothing) * logp_correct_P - label_smoothing * logp_flipped_P
    metrics = {"accuracy": _wins(gap_P), **_rewards(beta * chosen_ratio_P, beta * rejected_ratio_P)}
    return _mean(loss_P, total_pairs, metrics)


def _check(name: str, like_P: Tensor, total_pairs: float, **columns: Tensor) -> None:
    for other, x_P in columns.items():
        if like_P.dim() != 1 or x_P.shape != like_P.shape:
            raise ValueError(f"{name} has shape {list(like_P.shape)}, {other} {list(x_P.shape)}; both must be [P]")
    if not total_pairs > 0:
        raise ValueError(f"total_pairs={total_pairs}: a step without a pair has no mean; drop it")


def _wins(gap_P: Tensor) -> Tensor:
    """Return 1 where the chosen response is ahead, and 0.5 where the two are equal."""
    return (gap_P.detach().sign() + 1) / 2


def _rewards(chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Tensor]:
    chosen_P = chosen_P.detach().float()
    rejected_P = rejected_P.detach().float()
    return {"chosen_reward": chosen_P, "rejected_reward": rejected_P, "margin": chosen_P - rejected_P}


def _mean(loss_P: Tensor, total_pairs: float, metrics: dict[str, Tensor]) -> LossOutput:
    means = {name: x_P.sum() / total_pairs for name, x_P in metrics.items()}
    return LossOutput(loss=loss_P.sum() / total_pairs, metrics=means)

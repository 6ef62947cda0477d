"""Preference losses: what is minimised to rank the better of two responses first. P pairs of a micro-batch.

As in `aggregation`, everything is a sum over the micro-batch divided by the pairs of the whole optimizer step.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from components.rl.aggregation import LossOutput


def bradley_terry_loss(
    chosen_P: Tensor, rejected_P: Tensor, total_pairs: float, margin_P: Tensor | None = None
) -> LossOutput:
    """Negative log-likelihood that the chosen response wins, if rewards are log-odds of winning.

    -log sigmoid(chosen - rejected - margin) (Ouyang et al. 2022, arXiv 2203.02155, equation 1; the margin: Touvron et
    al. 2023, arXiv 2307.09288, equation 2).

    Args:
        chosen_P: [P] rewards of the chosen responses.
        rejected_P: [P] those of the rejected ones.
        total_pairs: pairs of the whole optimizer step, on all ranks.
        margin_P: [P] by how much the one should be better; None: 0.

    Returns:
        The loss, and the metrics `accuracy` (share of pairs ranked right, a tie is half of one), `chosen_reward`,
        `rejected_reward` and `margin`, means over the pairs.

    Raises:
        ValueError: shapes differ, or total_pairs is not positive.
    """
    columns = {"rejected_P": rejected_P} | ({} if margin_P is None else {"margin_P": margin_P})
    _check("chosen_P", chosen_P, total_pairs, **columns)
    gap_P = chosen_P.float() - rejected_P.float()
    loss_P = -logsigmoid(gap_P if margin_P is None else gap_P - margin_P)
    return _mean(loss_P, total_pairs, {"accuracy": _wins(gap_P), **_rewards(chosen_P, rejected_P)})


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
    """Direct preference optimisation: the policy is its own reward model, beta times its log-ratio to the reference.

    With z the chosen response's log-ratio minus the rejected one's:

    - -(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z), e = label_smoothing: DPO (Rafailov et al. 2023, arXiv
      2305.18290, equation 7), and for e > 0 conservative DPO (Mitchell 2023): a share e of the labels is wrong.
    - (z - 1 / (2 beta))^2: IPO (Azar et al. 2023, arXiv 2310.12036, equation 17). Log-ratios are sums over the
      response, as there; some libraries take means.

    Args:
        chosen_P: [P] log-probability of the chosen response, the sum over its tokens, in nats.
        rejected_P: [P] of the rejected one.
        reference_chosen_P: [P] the same under the reference; no gradient flows.
        reference_rejected_P: [P].
        total_pairs: pairs of the whole optimizer step, on all ranks.
        beta: how dear it is to leave the reference; above 0.
        label_smoothing: share of labels taken to be wrong, from 0 to below 0.5.
        ipo: the second form.

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
        right_P, wrong_P = logsigmoid(beta * gap_P), logsigmoid(-beta * gap_P)
        loss_P = -(1 - label_smoothing) * right_P - label_smoothing * wrong_P
    metrics = {"accuracy": _wins(gap_P), **_rewards(beta * chosen_ratio_P, beta * rejected_ratio_P)}
    return _mean(loss_P, total_pairs, metrics)


def _check(name: str, like_P: Tensor, total_pairs: float, **columns: Tensor) -> None:
    for other, x_P in columns.items():
        if like_P.dim() != 1 or x_P.shape != like_P.shape:
            raise ValueError(f"{name} has shape {list(like_P.shape)}, {other} {list(x_P.shape)}; both must be [P]")
    if not total_pairs > 0:
        raise ValueError(f"total_pairs={total_pairs}: a step without a pair has no mean; drop it")


def _wins(gap_P: Tensor) -> Tensor:
    """1 where the chosen response is ahead, half where they are level."""
    return (gap_P.detach().sign() + 1) / 2


def _rewards(chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Tensor]:
    chosen_P, rejected_P = chosen_P.detach().float(), rejected_P.detach().float()
    return {"chosen_reward": chosen_P, "rejected_reward": rejected_P, "margin": chosen_P - rejected_P}


def _mean(loss_P: Tensor, total_pairs: float, metrics: dict[str, Tensor]) -> LossOutput:
    means = {name: x_P.sum() / total_pairs for name, x_P in metrics.items()}
    return LossOutput(loss=loss_P.sum() / total_pairs, metrics=means)

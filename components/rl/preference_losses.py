"""Preference losses: losses that rank the better of two responses first, or learn from single judged responses.

Shape suffixes: P pairs of a micro-batch; B single responses. As in `aggregation`, every result is a sum over the
micro-batch divided by the number of pairs or responses of the complete optimizer step.
"""

import torch
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


def simpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    total_pairs: float,
    *,
    beta: float,
    gamma: float,
) -> LossOutput:
    """Simple preference optimisation (SimPO), -log sigmoid(beta (chosen - rejected) - gamma), without a reference.

    The implicit reward of a response is beta times its mean log-probability per token.

    Source: Meng et al. 2024, arXiv 2405.14734, equation 6.

    Args:
        chosen_P: [P] mean log-probability per token of the chosen response in nats.
        rejected_P: [P] mean log-probability per token of the rejected response in nats.
        total_pairs: number of pairs of the complete optimizer step, on all ranks.
        beta: scale of the implicit rewards, above 0.
        gamma: target difference between the two implicit rewards.

    Returns:
        The loss, and the metrics of `dpo_loss`.

    Raises:
        ValueError: shapes differ, or total_pairs is not positive.
    """
    _check("chosen_P", chosen_P, total_pairs, rejected_P=rejected_P)
    reward_chosen_P = beta * chosen_P.float()
    reward_rejected_P = beta * rejected_P.float()
    gap_P = reward_chosen_P - reward_rejected_P
    metrics = {"accuracy": _wins(gap_P), **_rewards(reward_chosen_P, reward_rejected_P)}
    return _mean(-logsigmoid(gap_P - gamma), total_pairs, metrics)


def orpo_loss(chosen_P: Tensor, rejected_P: Tensor, total_pairs: float, *, beta: float) -> LossOutput:
    """Odds-ratio preference optimisation (ORPO): likelihood of the chosen response and odds ratio, without a reference.

    With l the mean log-probability per token of a response and odds = exp(l) / (1 - exp(l)), the loss of a pair is
    -l_chosen - beta log sigmoid(log odds_chosen - log odds_rejected).

    Source: Hong et al. 2024, arXiv 2403.07691, equations 4 to 7; beta is their lambda.

    Args:
        chosen_P: [P] mean log-probability per token of the chosen response in nats.
        rejected_P: [P] mean log-probability per token of the rejected response in nats.
        total_pairs: number of pairs of the complete optimizer step, on all ranks.
        beta: weight of the odds ratio against the likelihood, above 0.

    Returns:
        The loss, the metrics of `dpo_loss` (the reward of a response is beta times its mean log-probability), and
        `nll`, the mean negative log-likelihood per token of the chosen responses.

    Raises:
        ValueError: shapes differ, or total_pairs is not positive.
    """
    _check("chosen_P", chosen_P, total_pairs, rejected_P=rejected_P)
    chosen_P = chosen_P.float()
    rejected_P = rejected_P.float()
    loss_P = -chosen_P - beta * logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))
    metrics = {
        "accuracy": _wins(chosen_P - rejected_P),
        **_rewards(beta * chosen_P, beta * rejected_P),
        "nll": -chosen_P.detach(),
    }
    return _mean(loss_P, total_pairs, metrics)


def kto_loss(
    log_ratio_B: Tensor,
    is_desirable_B: Tensor,
    kl: Tensor,
    total: float,
    total_desirable: float | Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossOutput:
    """Kahneman-Tversky optimisation (KTO) of single responses that are desirable or not.

    With r the log-ratio of a response to the reference and z the KL estimate of `kto_kl`, the loss of a desirable
    response is weight * (1 - sigmoid(beta (r - z))), and of an undesirable one weight * (1 - sigmoid(beta (z - r))).

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, equation 8.

    Args:
        log_ratio_B: [B] log-probability of each response minus that under the reference, in nats, summed over its
            tokens.
        is_desirable_B: [B] bool, True for desirable responses.
        kl: scalar, the KL estimate of the optimizer step in nats. No gradient flows.
        total: number of responses of the complete optimizer step, on all ranks.
        total_desirable: number of desirable ones among them.
        beta: strength of the penalty for leaving the reference, above 0.
        desirable_weight: weight of desirable responses.
        undesirable_weight: weight of undesirable responses.

    Returns:
        The loss, and as metrics: `accuracy` (share of responses whose log-ratio is on the right side of the KL
        estimate; a tie counts half), `chosen_reward` and `rejected_reward` (mean implicit reward of desirable and of
        undesirable responses, 0 if the step has none), `margin` (their difference) and `kl`.

    Raises:
        ValueError: shapes differ, or total is not positive.
    """
    _check("log_ratio_B", log_ratio_B, total, is_desirable_B=is_desirable_B)
    ratio_B = log_ratio_B.float()
    kl = kl.detach().float()
    sign_B = torch.where(is_desirable_B, 1.0, -1.0)
    weight_B = torch.where(is_desirable_B, desirable_weight, undesirable_weight)
    # 1 - sigmoid(x) is sigmoid(-x), which keeps its precision where sigmoid(x) rounds to 1.
    loss_B = weight_B * torch.sigmoid(-beta * sign_B * (ratio_B - kl))
    reward_B = beta * ratio_B.detach()
    # As tensors: a number on a GPU would be copied to the host here.
    chosen_count = torch.as_tensor(total_desirable, device=kl.device)
    chosen = (reward_B * is_desirable_B).sum() / chosen_count.clamp(min=1)
    rejected = (reward_B * ~is_desirable_B).sum() / (total - chosen_count).clamp(min=1)
    output = _mean(loss_B, total, {"accuracy": _wins(sign_B * (ratio_B - kl))})
    rewards = {"chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected}
    # Micro-batches are summed, so each of them contributes its share of the constant.
    return LossOutput(output.loss, output.metrics | rewards | {"kl": kl * len(ratio_B) / total})


def kto_kl(log_ratio_B: Tensor) -> Tensor:
    """Return KTO's estimate of the KL to the reference, a scalar of at least 0, in nats.

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, section 4.2: the mean log-ratio of prompts with responses to other
    prompts, which is biased but cheap.

    Args:
        log_ratio_B: [B] log-probabilities of the mismatched responses of all ranks minus those under the reference, in
            nats.
    """
    return log_ratio_B.detach().float().mean().clamp(min=0)


def _log_odds(logprob_P: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of probabilities p = exp(logprob). Log-probabilities are at most -1e-6."""
    # A probability that rounds to 1 would have infinite odds, and a NaN gradient.
    logprob_P = logprob_P.clamp(max=-1e-6)
    return logprob_P - torch.log(-torch.expm1(logprob_P))


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

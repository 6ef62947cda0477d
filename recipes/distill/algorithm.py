"""The algorithm of on-policy distillation: advantages from the teacher, and the loss.

To change the algorithm, copy the folder and edit this file. Shape suffixes: `B` responses, `N` all tokens of these
responses end to end, `K` the teacher's most likely tokens. Entry t of a per-token column belongs to token t.
"""

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.data.samples import compare_samples, with_correction
from components.models.next_tokens import candidate_logprobs
from components.rl import advantages
from components.rl.aggregation import LossOutput, TokenLoss, Totals, reduce_loss
from components.rl.distillation import divergence
from components.rl.masked import log_ratio, spread
from training.roles.policy_loss import clipped_policy_loss

from .config import DistillConfig

FAR = 5.0
"""Difference of log-probabilities in nats above which `distill/far_share` counts a token."""


def add_advantages(samples: Batch, config: DistillConfig) -> Batch:
    """Add `shaped_reward` [B] and `advantage` [N], and `correction` [N] if `algorithm.correction` is set.

    The advantage of a token is the teacher's log-probability minus the student's. A token pays for its own disagreement
    only, not for later ones. With `config.has_baseline` the KL at its position is added.

    Args:
        samples: all responses of a step with `logprob`, `teacher_logprob` [N], and with a baseline also the columns
            of `teacher_top` and `student_top`.
        config: the configuration of the run.

    Source: Lu et al. 2025 ("On-Policy Distillation"); the baseline: arXiv 2605.07865.
    """
    algorithm = config.algorithm
    mask_N = samples["action_mask"]
    advantage_N = -log_ratio(samples["logprob"], samples["teacher_logprob"], mask_N)
    if config.has_baseline:
        student_NK = from_columns(samples, "student_top", algorithm.top_k)
        teacher_NK = from_columns(samples, "teacher_top", algorithm.top_k)
        advantage_N = advantage_N + divergence(student_NK, teacher_NK, "reverse")
    if algorithm.reward_coef:
        reward_B = compare_samples(samples, samples["reward"], advantages.group_mean_baseline)
        advantage_N = advantage_N + algorithm.reward_coef * spread(reward_B, samples.lengths, samples.num_tokens)
    samples = samples.with_sequences(shaped_reward=samples["reward"]).with_tokens(advantage=advantage_N)
    return with_correction(samples, algorithm.correction, *algorithm.correction_range)


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: DistillConfig) -> LossOutput:
    """Return the loss of a micro-batch. All tokens of the optimizer step have equal weight."""
    if config.algorithm.loss == "policy_gradient":
        return clipped_policy_loss(model, micro, totals, config)
    algorithm = config.algorithm
    teacher_NK = from_columns(micro, "teacher_top", algorithm.top_k)
    ids_NK = from_columns(micro, "teacher_id", algorithm.top_k)
    student_NK = candidate_logprobs(model, micro, ids_NK, config.rollout.temperature)
    loss_N = divergence(student_NK, teacher_NK, algorithm.divergence, algorithm.jsd_beta)
    weight_N: Tensor | None = None
    if algorithm.correction != "none":
        weight_N = micro["correction"]
    tokens = TokenLoss(loss_N, {"divergence": loss_N.detach()})
    return reduce_loss(tokens, micro["action_mask"], micro.lengths, totals, weight_N=weight_N)


def to_columns(x_NK: Tensor, name: str) -> dict[str, Tensor]:
    """Return K columns `name_0`, `name_1`, ... of [N], because a per-token column has one entry per token."""
    return {f"{name}_{k}": x_N.contiguous() for k, x_N in enumerate(x_NK.unbind(1))}


def from_columns(batch: Batch, name: str, count: int) -> Tensor:
    """Return the columns of `to_columns`, [N, K]."""
    return torch.stack([batch[f"{name}_{k}"] for k in range(count)], dim=1)


def agreement(samples: Batch, config: DistillConfig) -> dict[str, float]:
    """Return metrics of the disagreement between student and teacher on the sampled tokens, in nats."""
    mask_N = samples["action_mask"]
    d_N = log_ratio(samples["logprob"], samples["teacher_logprob"], mask_N)[mask_N]
    metrics = {
        "distill/reverse_kl": d_N.mean().item(),
        "distill/reverse_kl_p99": d_N.quantile(0.99).item(),
        "distill/far_share": (d_N > FAR).float().mean().item(),
    }
    if config.algorithm.top_k:
        top_NK = from_columns(samples, "teacher_top", config.algorithm.top_k)
        metrics["distill/top_mass"] = top_NK[mask_N].exp().sum(-1).mean().item()
    return metrics

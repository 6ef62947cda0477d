"""The algorithm of DPO, KTO, ORPO and SimPO: log-probabilities of responses, and the losses.

Shape suffixes: `P` pairs, `B` = 2P sequences (chosen, rejected, chosen, ...), `E` examples of KTO, `N` all tokens.
"""

from torch import Tensor, nn

from components.batch import Batch
from components.models.causal import token_logprobs
from components.rl.aggregation import LossOutput, Totals
from components.rl.masked import chosen, sequence_means, sequence_sums
from components.rl.preference_losses import dpo_loss, kto_kl, kto_loss, orpo_loss, simpo_loss

from .config import DPOConfig

PAIR = 2
"""Number of sequences in a pair: the chosen response, then the rejected one."""


def response_logprobs(logprob_N: Tensor, batch: Batch) -> Tensor:
    """Return [B] the log-probability of each response given its prompt: the sum over its tokens, in nats."""
    return sequence_sums(chosen(batch["loss_mask"], logprob_N), batch.lengths)


def preference_loss(logprob_B: Tensor, batch: Batch, total_pairs: float, config: DPOConfig) -> LossOutput:
    """Return the DPO loss of pairs.

    Args:
        logprob_B: [B] log-probabilities of the responses under the policy, in nats.
        batch: the pairs, with `reference_logprob` [B], those under the reference model.
        total_pairs: number of pairs in the whole optimizer step on all ranks, by which the loss is divided.
        config: the configuration of the run.
    """
    chosen_P, rejected_P = logprob_B.view(-1, PAIR).unbind(1)
    reference_chosen_P, reference_rejected_P = batch["reference_logprob"].view(-1, PAIR).unbind(1)
    return dpo_loss(
        chosen_P,
        rejected_P,
        reference_chosen_P,
        reference_rejected_P,
        total_pairs,
        beta=config.algorithm.beta,
        label_smoothing=config.algorithm.label_smoothing,
        ipo=config.algorithm.ipo,
    )


def mean_loss(logprob_B: Tensor, batch: Batch, total_pairs: float, config: DPOConfig) -> LossOutput:
    """Return the SimPO or ORPO loss of pairs, on mean log-probabilities per token; see `preference_loss`."""
    # Without a reference, a sum would favour short responses whatever their quality.
    mean_B = logprob_B / batch.sum_tokens(batch["loss_mask"].float())
    chosen_P, rejected_P = mean_B.view(-1, PAIR).unbind(1)
    beta = config.algorithm.beta
    if config.algorithm.loss == "orpo":
        return orpo_loss(chosen_P, rejected_P, total_pairs, beta=beta)
    return simpo_loss(chosen_P, rejected_P, total_pairs, beta=beta, gamma=config.algorithm.simpo_gamma)


def with_kl(examples: Batch, mismatched_logprob_E: Tensor) -> Batch:
    """Return the responses of KTO's examples, without the mismatched ones, with the columns that their loss needs.

    Args:
        examples: 2E sequences, each response followed by a mismatched one.
        mismatched_logprob_E: [E] log-probabilities of the mismatched responses under the policy, in nats.
    """
    responses = examples.select(slice(0, None, PAIR))
    kl = kto_kl(mismatched_logprob_E - examples["reference_logprob"][1::PAIR])
    desirable = responses["is_desirable"].float().sum()
    # Columns, because each micro-batch needs the numbers of the whole step.
    size = len(responses)
    return responses.with_sequences(kl=kl.expand(size).clone(), desirable=desirable.expand(size).clone())


def judged_loss(logprob_E: Tensor, responses: Batch, total: float, config: DPOConfig) -> LossOutput:
    """Return the KTO loss of the responses that `with_kl` returns; see `preference_loss`."""
    algorithm = config.algorithm
    return kto_loss(
        logprob_E - responses["reference_logprob"],
        responses["is_desirable"],
        responses["kl"][0],
        total,
        responses["desirable"][0],
        beta=algorithm.beta,
        desirable_weight=algorithm.desirable_weight,
        undesirable_weight=algorithm.undesirable_weight,
    )


LOSSES = {"dpo": preference_loss, "kto": judged_loss, "orpo": mean_loss, "simpo": mean_loss}


def loss(model: nn.Module, micro: Batch, totals: Totals, config: DPOConfig) -> LossOutput:
    """Return the loss of a micro-batch, plus the weighted negative log-likelihood of the chosen responses."""
    logprob_N = token_logprobs(model, micro, mask="loss_mask").logprob_N
    total_pairs = totals.sequences / config.group_size
    compute = LOSSES[config.algorithm.loss]
    output = compute(response_logprobs(logprob_N, micro), micro, total_pairs, config)
    if not config.algorithm.nll_loss_coef:
        return output
    # Averaged over the tokens of a response, so that long responses do not have more weight (Pang et al. 2024,
    # arXiv 2404.19733). Only the chosen responses, which come first in each pair: the term must not raise the
    # probability of rejected ones.
    nll = -sequence_means(logprob_N, micro["loss_mask"], micro.lengths)[::PAIR].sum() / total_pairs
    return LossOutput(output.loss + config.algorithm.nll_loss_coef * nll, output.metrics | {"nll": nll.detach()})

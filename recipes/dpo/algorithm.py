"""What makes this DPO: the log-probability of a response, and the loss of a pair.

P pairs; B = 2P sequences, chosen and rejected in turn; N all tokens end to end.
"""

from torch import Tensor, nn

from components.batch import Batch
from components.models.causal import token_logprobs
from components.rl.aggregation import LossOutput, Totals
from components.rl.masked import chosen, sequence_means, sequence_sums
from components.rl.preference_losses import dpo_loss

from .config import DPOConfig

PAIR = 2
"""Sequences that belong together."""


def response_logprobs(logprob_N: Tensor, batch: Batch) -> Tensor:
    """[B] log-probability of each response given its prompt: the sum over its tokens, in nats."""
    return sequence_sums(chosen(batch["loss_mask"], logprob_N), batch.lengths)


def preference_loss(logprob_B: Tensor, batch: Batch, total_pairs: float, config: DPOConfig) -> LossOutput:
    """The loss of pairs to whose responses the policy and the reference model give these log-probabilities."""
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


def loss(model: nn.Module, micro: Batch, totals: Totals, config: DPOConfig) -> LossOutput:
    """The loss of the pairs, and the weight of the chosen responses' own likelihood."""
    logprob_N = token_logprobs(model, micro).logprob_N
    total_pairs = totals.sequences / PAIR
    output = preference_loss(response_logprobs(logprob_N, micro), micro, total_pairs, config)
    if not config.algorithm.nll_loss_coef:
        return output
    # Per token of its response, so that long ones do not count for more (Pang et al. 2024, arXiv 2404.19733).
    nll = -sequence_means(logprob_N, micro["loss_mask"], micro.lengths)[::PAIR].sum() / total_pairs
    return LossOutput(output.loss + config.algorithm.nll_loss_coef * nll, output.metrics | {"nll": nll.detach()})

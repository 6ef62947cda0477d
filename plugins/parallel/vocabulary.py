"""A vocabulary split over the ranks of the tensor axis: each rank computes the logits of a part of the tokens.

Legend: `V` tokens of this rank's part, `M` states with a label, `K` states of a chunk, `H` hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from components.models.logprobs import NO_CHANCE, Scratch, write_gradient
from components.models.vocabulary import Vocabulary


@contextmanager
def local_shards(module: nn.Module, *, partial_gradients: bool = False) -> Iterator[None]:
    """Inside, replace the DTensors among a module's parameters by this rank's parts.

    Args:
        module: the module. Its submodules are not changed.
        partial_gradients: the parameters are replicated, and their gradient is the sum over the ranks.
    """
    parameters: dict[str, Any] = module._parameters
    kept = dict(parameters)
    placements = None
    if partial_gradients:
        placements = [Partial()]
    for name, parameter in kept.items():
        if isinstance(parameter, DTensor):
            parameters[name] = parameter.to_local(grad_placements=placements)
    try:
        yield
    finally:
        parameters.update(kept)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks of a group as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class CopiedVocabulary(Vocabulary):
    """A vocabulary whose size the ranks do not divide. Each rank computes all logits."""

    @contextmanager
    def weights(self, head: nn.Linear) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Inside, this rank's parts of weight and bias."""
        with local_shards(head):
            yield head.weight, head.bias


class VocabularyPart(CopiedVocabulary):
    """The part of the vocabulary whose logits this rank computes. All ranks have the same states and labels."""

    def __init__(self, group: dist.ProcessGroup, first: int, size: int) -> None:
        """
        Args:
            group: the ranks that share the vocabulary.
            first: id of this rank's first token.
            size: number of this rank's tokens.
        """
        self.group = group
        self.first = first
        self.size = size

    def local(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each token in this part (0 outside of it), and the mask of the tokens of this part."""
        place = token - self.first
        is_own = (place >= 0) & (place < self.size)
        return place.where(is_own, 0), is_own

    def read(
        self,
        logits_KV: Tensor,
        label_K: Tensor,
        scale: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute log-probabilities and entropies without gathering the logits.

        With m the maximum of x over all ranks, s = sum_j exp(x_j - m) and t = sum_j exp(x_j - m) (x_j - m),
        log p_label = x_label - m - log s and H = log s - t / s. Four numbers per row are reduced over the ranks.
        """
        logprob_K, entropy_K, log_total_K = _read(logits_KV, label_K, scale, self)
        return logprob_K, entropy_K if with_entropy else None, log_total_K

    def write_gradient(
        self,
        logits_KV: Tensor,
        label_K: Tensor,
        scale: float,
        logprob_grad_K: Tensor,
        entropy: tuple[Tensor, Tensor] | None,
        log_total_K: Tensor | None,
    ) -> None:
        """Overwrite the logits of this part with their gradient."""
        assert log_total_K is not None
        row_K = torch.arange(len(label_K), device=label_K.device)
        place_K, is_own_K = self.local(label_K)
        # A label in another rank's part adds nothing to this rank's logits.
        label_grad_K = logprob_grad_K.where(is_own_K, 0.0)
        write_gradient(logits_KV, logits_KV, row_K, place_K, scale, logprob_grad_K, entropy, label_grad_K, log_total_K)

    def join(self, most_2K: Tensor, sums_2K: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the numbers of all parts; see `Vocabulary.join`."""
        most_of_all_2K = most_2K.clone()
        dist.all_reduce(most_of_all_2K, op=dist.ReduceOp.MAX, group=self.group)
        below_K, (total_K, slope_K) = most_2K[0] - most_of_all_2K[0], sums_2K
        scaled_2K = torch.stack([total_K, slope_K + total_K * below_K]) * below_K.exp()
        return most_of_all_2K, summed(scaled_2K, self.group)

    def sum_state_gradient(self, grad_MH: Tensor) -> Tensor:
        """Return the sum of the gradients of all parts."""
        return summed(grad_MH, self.group)


def _read(logits_MV: Tensor, label_M: Tensor, scale: float, part: VocabularyPart) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(len(logits_MV), device=logits_MV.device)
    place_M, is_own_M = part.local(label_M)
    scratch = Scratch(logits_MV, len(rows))
    most_M, total_M, slope_M, label_logit_M = scratch.first_KV.new_empty(4, len(rows)).unbind()
    for chunk in scratch.chunks(len(rows)):
        logits_KV = scratch.load(logits_MV, rows[chunk], scale)
        label_logit_M[chunk] = logits_KV.gather(1, place_M[chunk, None]).squeeze(1)
        most_M[chunk] = logits_KV.amax(1)
        logits_KV.sub_(most_M[chunk, None]).clamp_(min=NO_CHANCE)
        probability_KV = torch.exp(logits_KV, out=scratch.second_KV[: len(logits_KV)])
        total_M[chunk] = probability_KV.sum(1)
        slope_M[chunk] = probability_KV.mul_(logits_KV).sum(1)
    label_logit_M = label_logit_M.where(is_own_M, -math.inf)
    most_2M, sums_2M = part.join(torch.stack([most_M, label_logit_M]), torch.stack([total_M, slope_M]))
    (most_M, label_logit_M), (total_M, slope_M) = most_2M, sums_2M
    log_total_M, label_logit_M = total_M.log(), label_logit_M - most_M
    return label_logit_M - log_total_M, log_total_M - slope_M / total_M, most_M + log_total_M

"""Softmax over the vocabulary of the logits of an output layer.

By default each rank has all logits. A plug-in that divides the vocabulary over ranks sets a `Vocabulary` of its own on
an output layer, once, with `set_vocabulary`.

Legend: `V` vocabulary, or this rank's part of it; `M` states that have a label, `K` states of a chunk, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from components.models.logprobs import read_logits, write_gradient

_MARK = "vocabulary"


class Vocabulary:
    """Vocabulary for which this rank has all logits."""

    @contextmanager
    def weights(self, head: nn.Linear) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Context manager that provides the weight and bias of the output layer on this rank."""
        yield head.weight, head.bias

    def read(
        self, logits_KV: Tensor, label_K: Tensor, scale: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute log-probabilities of the labels, and entropies, without a graph.

        Returns:
            [K] log-probabilities; [K] entropies or None; [K] logarithms of the sums of exp(logit / scale), which
            `write_gradient` needs, or None if this rank has all logits.
        """
        # Every label has a row of its own here, unlike in a batch whose sequences share positions.
        row_K = torch.arange(len(label_K), device=label_K.device)
        return *read_logits(logits_KV, row_K, label_K, scale, with_entropy), None

    def write_gradient(
        self,
        logits_KV: Tensor,
        label_K: Tensor,
        scale: float,
        logprob_grad_K: Tensor,
        entropy: tuple[Tensor, Tensor] | None,
        log_total_K: Tensor | None,  # noqa: ARG002 - of a part of the vocabulary
    ) -> None:
        """Replace logits by their gradient; see `write_gradient` of logprobs.py.

        Args:
            logits_KV: [K, V].
            label_K: [K] int64 in the whole vocabulary.
            scale: sampling temperature.
            logprob_grad_K: [K] gradients of the labels' log-probabilities.
            entropy: [K] gradients of the entropies, and [K] the entropies, or None.
            log_total_K: the third result of `read`.
        """
        row_K = torch.arange(len(label_K), device=label_K.device)
        write_gradient(logits_KV, logits_KV, row_K, label_K, scale, logprob_grad_K, entropy)

    def sum_state_gradient(self, grad_MH: Tensor) -> Tensor:
        """Return the gradient of the states, to which every part of the vocabulary contributes."""
        return grad_MH


WHOLE_VOCABULARY = Vocabulary()


def set_vocabulary(head: nn.Module, vocabulary: Vocabulary) -> None:
    """Set the vocabulary that computes log-probabilities after an output layer."""
    setattr(head, _MARK, vocabulary)


def vocabulary_of(head: nn.Module) -> Vocabulary:
    """Return the vocabulary of an output layer."""
    return getattr(head, _MARK, WHOLE_VOCABULARY)

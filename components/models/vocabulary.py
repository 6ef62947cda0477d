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

    chunk_factor = 1
    """Number of logits of a chunk, as a multiple of the usual number."""

    def within(self, part: Vocabulary) -> Vocabulary:
        """Return the vocabulary of a layer that has this one and is split over ranks as in `part`."""
        return part

    def local(self, token: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the index of each token among the logits of this rank, and a mask of those that it has, or None
        if it has all.
        """
        return token, None

    def join(self, most_2K: Tensor, sums_2K: Tensor) -> tuple[Tensor, Tensor]:
        """Combine numbers of this rank's logits, x = logit / scale, with those of the ranks that have the others.

        Args:
            most_2K: [2, K], the maximum m of x, and x of the label or -inf if this rank lacks it.
            sums_2K: [2, K], the sums of exp(x - m) and of exp(x - m) (x - m).

        Returns:
            The same numbers of the whole vocabulary.
        """
        return most_2K, sums_2K

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

    def add_weight_gradient(self, total_VH: Tensor, grad_KV: Tensor, state_KH: Tensor) -> None:
        """Add the gradient of the weights of a chunk to their gradient in at least float32.

        Args:
            total_VH: [V, H], which is changed.
            grad_KV: [K, V] gradient of the logits.
            state_KH: [K, H] of the dtype of `grad_KV`.
        """
        # addmm_ accumulates without a temporary matrix, but only if the dtypes are equal.
        if grad_KV.dtype == total_VH.dtype:
            total_VH.addmm_(grad_KV.t(), state_KH)
        else:
            total_VH += grad_KV.t() @ state_KH

    def sum_state_gradient(self, grad_MH: Tensor) -> Tensor:
        """Return the gradient of the states, to which every part of the vocabulary contributes."""
        return grad_MH


WHOLE_VOCABULARY = Vocabulary()


def set_vocabulary(head: nn.Module, vocabulary: Vocabulary) -> None:
    """Set the vocabulary that computes log-probabilities after an output layer."""
    setattr(head, _MARK, vocabulary_of(head).within(vocabulary))


def vocabulary_of(head: nn.Module) -> Vocabulary:
    """Return the vocabulary of an output layer."""
    return getattr(head, _MARK, WHOLE_VOCABULARY)

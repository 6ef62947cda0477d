"""Output layer whose logits are read once per pass, in place of the passes of components/models/logprobs.py.

Legend: as in components/models/vocabulary.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from components.models.vocabulary import WHOLE_VOCABULARY, Vocabulary
from plugins.kernels.softmax import read_rows, replace_rows


class FusedVocabulary(Vocabulary):
    """Vocabulary, or a rank's part of it, with fused kernels."""

    chunk_factor = 8
    """The kernels need no copy of the logits, so a chunk of the same memory has more of them. A chunk's product is
    added to the gradient of the weights, which is read and written once per chunk."""

    def __init__(self, part: Vocabulary = WHOLE_VOCABULARY) -> None:
        """
        Args:
            part: vocabulary that determines the logits of this rank. Default: all logits.
        """
        self._part = part

    def within(self, part: Vocabulary) -> Vocabulary:
        """See `Vocabulary.within`."""
        return FusedVocabulary(part)

    @contextmanager
    def weights(self, head: nn.Linear) -> Iterator[tuple[Tensor, Tensor | None]]:
        """See `Vocabulary.weights`."""
        with self._part.weights(head) as parameters:
            yield parameters

    def local(self, token: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Vocabulary.local`."""
        return self._part.local(token)

    def join(self, most_2K: Tensor, sums_2K: Tensor) -> tuple[Tensor, Tensor]:
        """See `Vocabulary.join`."""
        return self._part.join(most_2K, sums_2K)

    def sum_state_gradient(self, grad_MH: Tensor) -> Tensor:
        """See `Vocabulary.sum_state_gradient`."""
        return self._part.sum_state_gradient(grad_MH)

    def read(
        self, logits_KV: Tensor, label_K: Tensor, scale: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See `Vocabulary.read`."""
        place_K, has_label_K = self.local(label_K)
        most_2K, sums_2K = read_rows(logits_KV, place_K, scale).split(2)
        if has_label_K is not None:
            most_2K = torch.stack([most_2K[0], most_2K[1].where(has_label_K, -torch.inf)])
        (most_K, label_logit_K), (total_K, slope_K) = self.join(most_2K, sums_2K)
        log_total_K = total_K.log()
        entropy_K = log_total_K - slope_K / total_K if with_entropy else None
        return label_logit_K - most_K - log_total_K, entropy_K, most_K + log_total_K

    def write_gradient(
        self,
        logits_KV: Tensor,
        label_K: Tensor,
        scale: float,
        logprob_grad_K: Tensor,
        entropy: tuple[Tensor, Tensor] | None,
        log_total_K: Tensor | None,
    ) -> None:
        """See `Vocabulary.write_gradient`."""
        assert log_total_K is not None
        place_K, has_label_K = self.local(label_K)
        offset_K = label_grad_K = logprob_grad_K / scale
        if has_label_K is not None:
            label_grad_K = label_grad_K.where(has_label_K, 0.0)
        numbers = [log_total_K, offset_K, label_grad_K]
        if entropy is not None:
            entropy_grad_K = entropy[0] / scale
            numbers = [log_total_K, offset_K + entropy_grad_K * entropy[1], label_grad_K, entropy_grad_K]
        replace_rows(logits_KV, place_K, torch.stack(numbers), scale)

    def add_weight_gradient(self, total_VH: Tensor, grad_KV: Tensor, state_KH: Tensor) -> None:
        """See `Vocabulary.add_weight_gradient`."""
        if grad_KV.dtype == total_VH.dtype or grad_KV.device.type == "cpu":
            # A CPU has no product of bfloat16 matrices with a float32 result.
            super().add_weight_gradient(total_VH, grad_KV, state_KH)
        else:
            torch.addmm(total_VH, grad_KV.t(), state_KH, out_dtype=total_VH.dtype, out=total_VH)

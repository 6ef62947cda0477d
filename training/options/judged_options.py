"""Options of recipes that learn from pairs or from single responses with a label. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from training.options.pair_options import PairDataOptions, PairOptions
from training.options.schema import without_effect
from training.options.supervised_options import Rows

if TYPE_CHECKING:
    from components.data.preferences import PairFormat, PreferenceData
    from components.train.config import TrainConfig


@dataclass(kw_only=True)
class JudgedDataOptions(PairDataOptions):
    """Pairs of responses, or single responses with a label."""

    completion_key: str = "completion"
    """With labels (algorithm.loss=kto): column of the response. A row without it has a pair, which is read as two."""
    label_key: str = "label"
    """With labels: column of the label. True or 1 for a desirable response, false or 0 for an undesirable one."""


@dataclass(kw_only=True)
class JudgedOptions(PairOptions):
    """Groups of options of a recipe that can also learn from single responses with a label."""

    data: JudgedDataOptions = field(default_factory=JudgedDataOptions)  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def reads_labels(self) -> bool:
        """True if the loss learns from single responses with a label. Pairs are then split into two."""
        return False

    @property
    def group_size(self) -> int:
        """Number of sequences of one example in an optimizer step."""
        # A mismatched response, which only the KL estimate needs, follows each response in the data.
        if self.reads_labels:
            return 1
        return self.GROUP_SIZE

    @property
    def noun(self) -> str:
        """See `SupervisedOptions.noun`."""
        if self.reads_labels:
            return "responses"
        return super().noun

    def examples_in(self, rows: Rows) -> int:
        """See `SupervisedOptions.examples_in`. With labels, a pair is two examples."""
        if not self.reads_labels:
            return len(rows)
        return sum(1 + (row.get(self.data.completion_key) is None) for row in rows)

    def notes(self, set_options: Collection[str]) -> list[str]:
        """See `SupervisedOptions.notes`."""
        names = ("data.completion_key", "data.label_key")
        idle = [(not self.reads_labels, name, "the loss reads pairs, without labels") for name in names]
        return without_effect(idle, set_options) + super().notes(set_options)

    def engine(self, total_steps: int) -> TrainConfig:
        """See `SupervisedOptions.engine`."""
        config = super().engine(total_steps)
        # 0 sets no limit.
        micro_batch_size = self.train.micro_batch_size or 0
        # The base class counts pairs of sequences, and a response with a label is trained alone.
        return replace(config, max_sequences=self.group_size * micro_batch_size)

    def encoder(self) -> Callable[..., PreferenceData]:
        """See `PairOptions.encoder`."""
        if not self.reads_labels:
            return super().encoder()
        # Imported here, because these modules import torch.
        from components.data.completions import encode_completions

        return encode_completions

    def pair_format(self, source: str) -> PairFormat:
        """See `PairOptions.pair_format`."""
        pairs = super().pair_format(source)
        if not self.reads_labels:
            return pairs
        from components.data.completions import CompletionFormat

        # The columns of pairs stay, because a file of pairs is read as two responses per pair.
        return CompletionFormat(**vars(pairs), completion_key=self.data.completion_key, label_key=self.data.label_key)

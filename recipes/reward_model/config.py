"""Options of this recipe. Those of all recipes on pairs are in training/options/supervised_options.py.

`--flag value` and `flag=value` are equivalent. `--config FILE` reads YAML. `--help all` describes every option. The
flags of OpenRLHF's train_rm are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from components.models.new_model import new_model
from training.options.model_options import ModelOptions
from training.options.pair_options import PairOptions
from training.options.schema import Options
from training.options.supervised_options import SupervisedTrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.preferences import PairFormat

NEW_FROM_TEXT = "new:text"
"""Value of `model.path` that creates an untrained model with a vocabulary trained on the texts of the data."""


@dataclass(kw_only=True)
class ScorerOptions(ModelOptions):
    """Model to start from, and its head."""

    value_head_prefix: str = "score"
    """Name of the head's weights. transformers' AutoModelForSequenceClassification loads only `score`, the default."""


@dataclass(kw_only=True)
class RewardLossOptions(Options, group="algorithm"):
    """Loss on the scores of a pair."""

    margin_loss: bool = False
    """Subtract the column `margin` from the score difference in the loss. Default: the margin is 0."""


@dataclass(kw_only=True)
class RewardModelConfig(PairOptions):
    """Training of a reward model on pairs of responses."""

    ADAPTERS: ClassVar = ("openrlhf.train_rm",)

    model: ScorerOptions = field(default_factory=ScorerOptions)
    algorithm: RewardLossOptions = field(default_factory=RewardLossOptions)
    train: SupervisedTrainOptions = field(default_factory=lambda: SupervisedTrainOptions(learning_rate=9e-6))

    @property
    def models(self) -> dict[str, str]:
        """See `SupervisedOptions.models`."""
        # The new model is created from the data of the run, so there is no folder to check.
        return {} if self.model.path == NEW_FROM_TEXT else super().models

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        """See `SupervisedOptions.tokenizer`. The padding token differs from the end token.

        transformers reads the score at the last token that is not padding, so it must not skip the end token.
        """
        from components.data.padding import pad_apart_from_end

        if path == NEW_FROM_TEXT:
            # Before its vocabulary is trained: pad, bos and eos, and one token per byte.
            return new_model(path).tokenizer()
        tokenizer = super().tokenizer(path)
        pad_apart_from_end(tokenizer)
        return tokenizer

    def pair_format(self, source: str) -> PairFormat:
        """See `PairOptions.pair_format`."""
        return replace(super().pair_format(source), with_margin=self.algorithm.margin_loss)

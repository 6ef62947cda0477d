"""The options of this recipe, beside those that recipes on pairs share; `--help all` describes them.

`--flag value` and `flag=value` mean the same; `--config FILE` reads YAML. OpenRLHF's names of train_rm are understood.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from components.models.sources import new_model
from training.options.model_options import ModelOptions
from training.options.pair_options import PairOptions
from training.options.schema import Options
from training.options.supervised_options import SupervisedTrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.preferences import PairFormat

NEW_FROM_TEXT = "new:text"
"""What `model.path` is where the trainer makes an untrained model, whose vocabulary is learnt from the responses."""


@dataclass(kw_only=True)
class ScorerOptions(ModelOptions):
    """The model to start from, and its head."""

    value_head_prefix: str = "score"
    """Name of the head's weights. Under `score` transformers' AutoModelForSequenceClassification finds them."""


@dataclass(kw_only=True)
class RewardLossOptions(Options, group="algorithm"):
    """The loss on the scores of a pair."""

    margin_loss: bool = False
    """The better response has to be ahead by the number in the column `margin`."""


@dataclass(kw_only=True)
class RewardModelConfig(PairOptions):
    """Learn from pairs of responses which one is better."""

    ADAPTERS: ClassVar = ("openrlhf.train_rm",)

    model: ScorerOptions = field(default_factory=ScorerOptions)
    algorithm: RewardLossOptions = field(default_factory=RewardLossOptions)
    train: SupervisedTrainOptions = field(default_factory=lambda: SupervisedTrainOptions(learning_rate=9e-6))

    @property
    def models(self) -> dict[str, str]:
        """See `SupervisedOptions.models`."""
        return {} if self.model.path == NEW_FROM_TEXT else super().models

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        """See `SupervisedOptions.tokenizer`. Its token for padding is not the end token, by which a score is found."""
        from components.data.text import pad_apart_from_end

        if path == NEW_FROM_TEXT:
            return new_model(path).tokenizer()  # before the model is made: pad, bos and eos, and every byte
        found = super().tokenizer(path)
        pad_apart_from_end(found)
        return found

    def pair_format(self, source: str) -> PairFormat:
        """See `PairOptions.pair_format`."""
        return replace(super().pair_format(source), with_margin=self.algorithm.margin_loss)

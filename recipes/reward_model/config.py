"""The options of this recipe, beside those that recipes on pairs share; `--help` prints them all.

`--flag value` and `flag=value` mean the same; `--config FILE` reads YAML. The names are those of OpenRLHF's train_rm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.options import new_run_dir
from training.supervised_flags import refused
from training.supervised_options import PairOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.preferences import PairFormat

RECIPE = Path(__file__).parent.name
NEW_FROM_TEXT = "new:text"


@dataclass(kw_only=True)
class RewardModelConfig(PairOptions):
    """Learn from pairs of responses which one is better."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        **PairOptions.ALIASES,
        "value_prefix_head": "value_head_prefix",
        "ds.value_head_prefix": "value_head_prefix",
        "model.margin_loss_enable": "margin_loss",
    }
    REFUSED: ClassVar[Mapping[str, Any]] = {
        **PairOptions.REFUSED,
        **refused("loss loss_type model.loss_type", "there is one, -log sigmoid of the difference", str, "sigmoid"),
        **refused("compute_fp32_loss model.compute_fp32_loss_enable", "losses are float32", harmless="true"),
        **refused("lora_rank ds.lora.rank", "all weights are trained, as the head is new; leave it out", int, "0"),
        **refused("lora_alpha ds.lora.alpha lora_dropout ds.lora.dropout", "no adapters here; leave it out", float),
        **refused("target_modules ds.lora.target_modules", "no adapters here; leave it out", list[str]),
    }

    run_dir: str = field(default_factory=lambda: new_run_dir(RECIPE))
    """Folder of everything that the run writes."""
    pretrain: str = ""
    """The model to start from: a folder or hub name, `warm_start:<task>` for a task's demonstration model, or
    `new:text` for an untrained tiny one whose vocabulary is learnt from the responses."""
    value_head_prefix: str = "score"
    """Name of the head's weights. Under `score` transformers' AutoModelForSequenceClassification finds them."""
    margin_loss: bool = False
    """The better response has to be ahead by what the column `margin` says."""
    learning_rate: float = 9e-6
    """Peak learning rate."""

    @property
    def models(self) -> dict[str, str]:
        """See `SupervisedOptions.models`."""
        return {} if self.pretrain == NEW_FROM_TEXT else super().models

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        """See `SupervisedOptions.tokenizer`. Its token for padding is not the end token, by which a score is found."""
        from components.data.text import pad_apart_from_end
        from components.data.tiny_model import learnt_tokenizer

        if path == NEW_FROM_TEXT:
            return learnt_tokenizer([], 3 + 256)  # before the model is made: pad, bos and eos, and every byte
        found = super().tokenizer(path)
        pad_apart_from_end(found)
        return found

    def pair_format(self, source: str) -> PairFormat:
        """See `PairOptions.pair_format`."""
        return replace(super().pair_format(source), with_margin=self.margin_loss)

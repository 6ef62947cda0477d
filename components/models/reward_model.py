"""Reward model, which gives one score for a whole sequence.

Legend: `B` sequences, `N` all tokens of the batch end to end, `T` length of the longest sequence.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from components.batch import Batch
from components.models.state_values import state_values
from components.models.value_model import load_value_model
from components.train.config import FrozenConfig, weight_type
from components.train.frozen import FrozenEngine, is_read_by_parts


def note_statistics(folder: str | Path, mean: float, std: float) -> None:
    """Write mean and standard deviation of the scores into a saved model's config.json, for `normalize`."""
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"mean": mean, "std": std}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class RewardModel:
    """A classifier with one label over a causal transformer, on the GPU when there is one."""

    def __init__(
        self,
        path: str | Path,
        config: FrozenConfig | None = None,
        *,
        normalize: bool = False,
        value_head_prefix: str = "score",
        attn_implementation: str | None = None,
    ) -> None:
        """
        Args:
            path: folder or hub name of a model that `AutoModelForSequenceClassification` with num_labels=1 wrote.
            config: configuration of its engine. Scores are float32 in any precision.
            normalize: subtract the `mean` and divide by the `std` in the model's config.json.
            value_head_prefix: prefix of the head: its weights are named `<prefix>.weight`.
            attn_implementation: attention implementation of transformers, or None for its default.

        Raises:
            ValueError: the folder has no such head; the head has several labels; or config.json lacks the mean and std
                that `normalize` needs.
        """
        config = config or FrozenConfig()
        model = load_value_model(
            path,
            dtype=weight_type(config.precision),
            attn_implementation=attn_implementation,
            value_head_prefix=value_head_prefix,
            normalize=normalize,
            needs_head=True,
            packing=config.packing,
            empty=is_read_by_parts(config),
        )
        self._engine = FrozenEngine(model, config)

    def score(self, batch: Batch) -> Tensor:
        """Return the score of each sequence, [B] float32 on the CPU.

        It is the output of the head after the last token of the sequence, even if that is the padding token or a second
        end token.

        Raises:
            ValueError: a sequence has no token.
        """
        empty = (batch.lengths == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(
                f"sequence {empty[0]} of {len(batch)} has no token, so nothing can be scored; leave it out"
            )
        # The other columns are not needed, and would be copied to the device with each micro-batch.
        score_N = self._engine.forward(batch.only("tokens"), state_values)
        return score_N[batch.offsets[1:] - 1]

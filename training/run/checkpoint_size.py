"""Size of a checkpoint before there is one. This module does not import torch."""

from __future__ import annotations

from typing import Any

from components.models.size import model_size
from training.options.run_options import RunOptions

WEIGHT_BYTES = {"bf16": 2}
"""Bytes of an exported weight by training precision. Models of other precisions are exported in float32, 4 bytes."""
STATE_BYTES = 12
"""Bytes per trained parameter in a checkpoint: its float32 value and the two moments of AdamW."""


def checkpoint_bytes(config: RunOptions) -> int:
    """Return a lower limit for the size of a checkpoint in bytes: weights, optimizer and export. 0 if unknown."""
    options: Any = config
    train = options.train
    size = model_size(options.model.path)
    if size is None:
        return 0
    nbytes = size.parameters * WEIGHT_BYTES.get(train.precision, 4)
    if getattr(train, "lora_rank", 0):
        return nbytes  # only adapters are trained, and their state is small
    nbytes += STATE_BYTES * size.parameters
    if getattr(options, "needs_critic", False) and (critic := model_size(options.critic.path or options.model.path)):
        nbytes += STATE_BYTES * critic.without_head.parameters
    # The exponential moving average of the weights is saved in float32.
    if getattr(train, "ema_beta", None):
        nbytes += 4 * size.parameters
    return nbytes

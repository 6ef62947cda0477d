"""Models with all tensors on the meta device, for names and shapes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@lru_cache(maxsize=4)
def meta_model(path: str | Path) -> PreTrainedModel:
    """Return the causal model at `path` with all its tensors on the meta device; no weight is read. It takes about a
    third of the start of an engine, so call it late.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))

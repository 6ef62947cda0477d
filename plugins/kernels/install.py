"""Use of fused kernels in a model that is trained."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from components.models.head import plain_head
from components.models.vocabulary import set_vocabulary
from components.registry import find
from plugins.kernels.choice import why_plain

_log = logging.getLogger(__name__)


def use_kernels(model: nn.Module, kernels: str, device: torch.device) -> None:
    """Use fused kernels in a model, in place, before it is sharded and after adapters were inserted.

    Args:
        model: policy or value model.
        kernels: "auto" or "fused".
        device: device on which the model is trained.

    Raises:
        ValueError: `kernels` is "fused", and the fused kernels cannot run.
    """
    backbone: Any = getattr(model, "backbone", model)
    family = backbone.config.get_text_config().model_type
    if (obstacle := why_plain(kernels, family, device.type == "cuda")) is not None:
        _log.info("plain kernels: %s", obstacle)
        return
    plain = []
    head = plain_head(model)
    if head is not None:
        # Imported only now, because Triton reads its environment at the import.
        from plugins.kernels.vocabulary import FusedVocabulary

        set_vocabulary(head, FusedVocabulary())
    elif backbone.get_output_embeddings() is not None:
        plain.append("the output layer, because the model changes its logits or it has an adapter")
    if (fuse_layers := find("training kernels", "layers")) is not None:
        plain += fuse_layers(backbone)
    if plain:
        _log.warning("train.kernels=%s leaves plain: %s", kernels, "; ".join(plain))

"""Weight layouts that vLLM's loader of a family accepts.

Legend: `E` experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from torch import Tensor

from components.models.disk.checkpoint_layout import CheckpointLayout
from components.models.disk.meta_model import meta_model
from plugins.vllm_weights.families import LAYOUTS


@lru_cache(maxsize=4)
def _checkpoint_layout(model_path: str) -> CheckpointLayout:
    model = meta_model(model_path)
    return CheckpointLayout(model, dict(model.named_parameters(remove_duplicate=False)))


def arranged(weights: Iterable[tuple[str, Tensor]], family: str, model_path: str) -> Iterable[tuple[str, Tensor]]:
    """Convert weights from the trainer's layout to the one that vLLM loads; one group of tensors at a time.

    Args:
        weights: names and tensors of transformers' model.
        family: `model_type` of the model.
        model_path: folder or hub name of the model.
    """
    layout = LAYOUTS.get(family, "trainer")
    if layout == "trainer":
        return weights
    if layout == "experts":
        return _expert_by_expert(weights)
    return _checkpoint_layout(model_path).converted(weights)


def _expert_by_expert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Split the tensors that hold all experts of a layer. vLLM's loader would copy unsplit tensors past the hooks of a
    reload, and the weights would be dropped.
    """
    for name, tensor in weights:
        prefix, is_expert, suffix = name.partition(".mlp.experts.")
        if not is_expert:
            yield name, tensor
            continue
        for expert, part in enumerate(tensor):
            yield f"{prefix}.mlp.experts.{expert}.{suffix}", part

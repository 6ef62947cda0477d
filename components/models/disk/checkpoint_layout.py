"""Names and shapes of a model's weights in the files that `save_pretrained` writes.

Transformers renames, joins and splits some weights when it loads a model. It holds all experts of a layer in one
tensor, where the files have one tensor per expert. Other libraries, and older versions, read the layout of the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CheckpointLayout:
    """Converts weights from the layout of a model to that of its files.

    It converts groups: several tensors of the model become one in the file, or one becomes several.
    """

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        """
        Args:
            model: its conversion rules and its configuration are used; its parameters are not read.
            tensors: shapes and dtypes of the weights, on the meta device, by the names of the model.
        """
        from transformers.core_model_loading import revert_weight_conversion

        self._convert = lambda group: revert_weight_conversion(model, group)
        whole = self._convert(dict(tensors))
        self.tensors = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in whole.items()}
        """Shapes and dtypes of the tensors in the files, as meta tensors."""
        groups = list(_groups(model, tensors))
        parts = [self._convert({name: tensors[name] for name in group}) for group in groups]
        apart = {name: tensor.shape for part in parts for name, tensor in part.items()}
        if apart != {name: tensor.shape for name, tensor in self.tensors.items()}:
            # A rule needs all weights at once, so the groups give other tensors than the whole.
            groups = [list(tensors)]
        self._group_of = {name: group for group in map(tuple, groups) for name in group}
        self.is_same = {name: t.shape for name, t in tensors.items()} == {n: t.shape for n, t in self.tensors.items()}
        """True if the files have the names and shapes of the model."""

    def converted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the files, each as soon as all weights of its group have arrived."""
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in weights:
            group = self._group_of[name]
            come = waiting.setdefault(group, {})
            come[name] = tensor
            # A complete group is released, so that memory holds only the groups that are incomplete.
            if len(come) == len(group):
                yield from self._convert(waiting.pop(group)).items()


def _groups(model: Any, names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the names of the weights that are converted together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        # As `revert_weight_conversion` does for a model that was not loaded from files.
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    rules = [rule.reverse_transform() for rule in reversed(conversions)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings: list[Any] = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        target, _ = rename_source_key(name, renamings, converters, reverse=True)
        groups.setdefault(target, []).append(name)
    yield from groups.values()

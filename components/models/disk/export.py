"""Export of a model to a folder that `from_pretrained` loads. Weights are written one by one as they arrive."""

from __future__ import annotations

import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from components.models.disk.checkpoint_layout import CheckpointLayout
from components.models.disk.settings import save_settings
from components.models.disk.tensor_file import TensorFile

FILE_BYTES = 5 * 10**9
"""Maximum size of a file in bytes, unless a single tensor is larger."""
_PATTERN, _INDEX = "model{suffix}.safetensors", "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class StoredModel(nn.Module, ABC):
    """Base class of models that are not models of transformers and define their own files."""

    @abstractmethod
    def stored_name(self, name: str) -> str:
        """Return the name of a parameter in the files."""

    @abstractmethod
    def save_config(self, path: str | Path, dtype: torch.dtype) -> None:
        """Write config.json into a folder, for weights of this dtype."""


def save_model(
    folder: Path,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    weights: Iterable[tuple[str, Tensor]],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write config.json and the weights of a model.

    Args:
        folder: path to the folder, which is created if it is missing. Weights of another model in it are replaced.
        model: policy or value model. Its parameters are not read.
        tensors: shapes and dtypes of all weights, as meta tensors, by the names of the model.
        weights: all weights of `tensors`, in any order. Each one is freed after it has been written.
        file_bytes: maximum size of a file in bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(iter(tensors.values())).dtype
    if isinstance(model, StoredModel):
        model.save_config(folder, dtype)
        stored = {model.stored_name(name): tensor for name, tensor in tensors.items()}
        _write(folder, stored, ((model.stored_name(name), tensor) for name, tensor in weights), file_bytes)
        return
    policy: Any = model
    config = copy.deepcopy(policy.config)
    config.architectures = [type(policy).__name__.removeprefix("FSDP")]
    config.dtype = dtype
    # Models that cannot generate do not have the attribute.
    save_settings(folder, config, getattr(policy, "generation_config", None))
    layout = CheckpointLayout(policy, tensors)
    _write(folder, layout.tensors, layout.converted(weights), file_bytes)


def _write(folder: Path, tensors: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], file_bytes: int) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=_PATTERN, max_shard_size=file_bytes)
    # Old files must not remain: `from_pretrained` prefers a single file, even an old one, to new shards.
    for old in folder.iterdir():
        if old.name == _INDEX or _OURS.fullmatch(old.name):
            old.unlink()
    # All files are open at the same time, because the weights arrive in any order.
    with ExitStack() as stack:
        file_of: dict[str, TensorFile] = {}
        for file, names in split.filename_to_tensors.items():
            opened = stack.enter_context(TensorFile(folder / file, {name: tensors[name] for name in names}))
            file_of |= dict.fromkeys(names, opened)
        for name, tensor in weights:
            file_of[name].write(name, tensor)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

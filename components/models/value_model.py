"""A value model: one number for each state of a causal transformer, as a critic or a reward model has."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from components.models.disk.empty_model import model_folder
from components.models.disk.export import StoredModel
from components.models.disk.tensor_file import TensorReader
from components.models.freed_memory import keep_freed_memory
from components.models.loading import open_model, prepare_attention
from components.models.packing.layout import RowLayout, layout_of
from components.models.packing.row_slices import RowSlices, row_slices


class ValueModel(StoredModel):
    """A transformer with one number per state instead of a distribution over the next token."""

    def __init__(
        self,
        backbone: PreTrainedModel,
        seed: int = 0,
        value_head_prefix: str = "score",
        statistics: tuple[float, float] | None = None,
    ) -> None:
        """
        Args:
            backbone: the transformer without its head.
            seed: of the first weights of the head.
            value_head_prefix: the head's weights are saved as `<prefix>.weight`.
            statistics: (mean, std), by which the values are (score - mean) / std; None: the scores themselves.
        """
        super().__init__()
        self.backbone = backbone
        self.value_head_prefix = value_head_prefix
        self.statistics = statistics
        hidden = _state_size(backbone.config)
        self.score = nn.Linear(hidden, 1, bias=False, dtype=backbone.dtype)
        # Small, so that the first values are near 0 and advantages are the rewards; the same on all ranks.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.score.weight.copy_(torch.randn(1, hidden, generator=generator) / (hidden + 1))

    @property
    def row_layout(self) -> RowLayout:
        """The layout of its sequences, for `layout_of`."""
        return layout_of(self.backbone)

    @property
    def row_slices(self) -> RowSlices:
        """The slices of its rows, for `row_slices`."""
        return row_slices(self.backbone)

    def forward(self, **inputs: Any) -> Tensor:
        """[B, T] float32 values of the states after each input token."""
        score_BT1 = self.score(self.backbone(**inputs).last_hidden_state)
        # A copy: the hooks that fully_shard puts on a model's output get lost when it is a view.
        score_BT = score_BT1.squeeze(-1).to(torch.float32, copy=True)
        if self.statistics is None:
            return score_BT
        mean, std = self.statistics
        return (score_BT - mean) / std

    def save_pretrained(self, path: str | Path) -> None:
        """Write the folder that `load_value_model` loads, with the same prefix of the head and the same `normalize`.

        With the prefix "score" transformers' `...ForSequenceClassification` loads it too, to give the scores before
        they are normalised.

        Args:
            path: folder, made when missing.
        """
        from safetensors.torch import save_file

        self.save_config(path, self.backbone.dtype)
        weights = {self.stored_name(name): tensor.detach().cpu() for name, tensor in self.named_parameters()}
        save_file(weights, Path(path) / "model.safetensors", metadata={"format": "pt"})

    def stored_name(self, name: str) -> str:
        """Return the name of a parameter in the files."""
        prefixes = {"backbone": self.backbone.base_model_prefix, "score": self.value_head_prefix}
        part, _, rest = name.partition(".")
        return f"{prefixes[part]}.{rest}"

    def save_config(self, path: str | Path, dtype: torch.dtype) -> None:
        """Write the config.json of that folder, for weights of this type."""
        config = copy.deepcopy(self.backbone.config)
        config.num_labels = 1
        config.dtype = dtype
        classifier: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
        # Under another name it would not find the head, and make up a random one.
        config.architectures = [classifier.__name__] if classifier and self.value_head_prefix == "score" else None
        for name in ("mean", "std"):
            # Those of the reward model that this one started from say nothing about these scores.
            vars(config).pop(name, None)
        if self.statistics is not None:
            config.mean, config.std = self.statistics
        config.save_pretrained(path)


def load_value_model(
    path: str | Path,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
    seed: int = 0,
    attn_implementation: str | None = None,
    value_head_prefix: str = "score",
    normalize: bool = False,
    needs_head: bool = False,
    packing: bool | None = False,
    empty: bool = False,
) -> ValueModel:
    """A value model from a value model's folder, a reward model's, or any policy's.

    Args:
        path: what `from_pretrained` takes.
        dtype: of the parameters, "float32" or "bfloat16".
        gradient_checkpointing: as in `load_policy`.
        seed: of the value head, where the folder has none.
        attn_implementation: as in `load_policy`.
        value_head_prefix: the folder keeps the head as `<prefix>.weight`.
        normalize: subtract the `mean` and divide by the `std` that a reward model has in its config.json.
        needs_head: no random head where the folder has none.
        packing: as in `load_policy`.
        empty: as in `load_policy`; the head is whole.

    Raises:
        ValueError: the folder's head does not fit, is missing though it is needed, or mean and std are; or the model
            cannot be packed.
    """
    # All that is small is checked before the weights are read, which may take minutes.
    config = AutoConfig.from_pretrained(path)
    statistics = score_statistics(config, path) if normalize else None
    head_1H = _stored_head(path, value_head_prefix)
    if head_1H is None and needs_head:
        raise ValueError(
            f"{path} has no {value_head_prefix}.weight in its safetensors files, so it is no reward model, or its head "
            "has another name; set value_head_prefix to what stands before .weight there"
        )
    if head_1H is not None and list(head_1H.shape) != [1, _state_size(config)]:
        raise ValueError(
            f"{value_head_prefix}.weight of {path} has shape {list(head_1H.shape)}, not {[1, _state_size(config)]}: "
            "it scores several classes; use a model with num_labels=1"
        )
    backbone, probe = open_model(AutoModel, path, dtype, attn_implementation, empty)
    keep_freed_memory(backbone)
    prepare_attention(backbone, probe, attn_implementation, packing, gradient_checkpointing)
    model = ValueModel(backbone, seed, value_head_prefix, statistics)
    if head_1H is not None:
        with torch.no_grad():
            model.score.weight.copy_(head_1H)
    return model


def _state_size(config: PretrainedConfig) -> int:
    """Numbers in the state that a backbone gives per token; OPT may project it to the size of its embeddings."""
    text: Any = config.get_text_config()
    return getattr(text, "word_embed_proj_dim", None) or text.hidden_size


def score_statistics(config: PretrainedConfig, path: str | Path) -> tuple[float, float]:
    """Mean and standard deviation of the scores, as the training of the reward model wrote them down.

    Raises:
        ValueError: they are not in the model's config.json, or cannot be used.
    """
    mean, std = getattr(config, "mean", None), getattr(config, "std", None)
    is_mean = isinstance(mean, int | float) and math.isfinite(mean)
    is_std = isinstance(std, int | float) and 0 < std < math.inf
    if not (is_mean and is_std):
        raise ValueError(
            f"config.json of {path} has mean={mean} and std={std}; to normalise takes a finite mean and a positive "
            "std, as a reward model's training writes them there; set them there, or do not normalise"
        )
    return float(mean), float(std)  # pyright: ignore[reportArgumentType]: they are numbers


def _stored_head(path: str | Path, prefix: str) -> Tensor | None:
    """The value head of a saved value or reward model, [1, H]; None when there is none."""
    for file in sorted(model_folder(path).glob("*.safetensors")):
        with TensorReader(file) as weights:
            if f"{prefix}.bias" in weights:
                raise ValueError(
                    f"{path} has a {prefix}.bias: a head of another kind, whose scores would be wrong here; use "
                    "a model that AutoModelForSequenceClassification of a causal architecture wrote"
                )
            if f"{prefix}.weight" in weights:
                return weights.whole(f"{prefix}.weight")
    return None

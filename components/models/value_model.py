"""Value model, which gives one number for each state of a causal transformer. Critics and reward models use it."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

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
            backbone: transformer without its output layer.
            seed: seed of the initial weights of the head.
            value_head_prefix: prefix of the head, whose weights are saved as `<prefix>.weight`.
            statistics: (mean, std) with which values are normalized: (score - mean) / std. None: not normalized.
        """
        super().__init__()
        self.backbone = backbone
        self.value_head_prefix = value_head_prefix
        self.statistics = statistics
        hidden = _state_size(backbone.config)
        self.score = nn.Linear(hidden, 1, bias=False, dtype=backbone.dtype)
        # Small weights, so that the first values are near 0 and the advantages near the rewards. A seeded generator, so
        # that all ranks have the same weights.
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
        """Return the values of the states after each input token, [B, T] float32."""
        score_BT1 = self.score(self.backbone(**inputs).last_hidden_state)
        # A copy, because a view would lose the hooks that fully_shard puts on the output.
        score_BT = score_BT1.squeeze(-1).to(torch.float32, copy=True)
        if self.statistics is None:
            return score_BT
        mean, std = self.statistics
        return (score_BT - mean) / std

    def save_pretrained(self, path: str | Path) -> None:
        """Write a folder that `load_value_model` loads, with the same prefix of the head and the same `normalize`.

        With the prefix "score", transformers' `...ForSequenceClassification` loads it too, and returns the scores
        before normalization.

        Args:
            path: path to the folder, which is created if it is missing.
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
        """Write config.json into the folder, for weights of this dtype."""
        config = copy.deepcopy(self.backbone.config)
        # Transformers creates the head with this number of outputs when it loads the folder.
        config.num_labels = 1
        config.dtype = dtype
        classifier: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
        # With another prefix, that class would not find the head and would use random weights without an error.
        config.architectures = None
        if classifier and self.value_head_prefix == "score":
            config.architectures = [classifier.__name__]
        for name in ("mean", "std"):
            # The backbone may come from a reward model, whose statistics do not describe the scores of this model.
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
    """Load a value model from the folder of a value model, a reward model or a policy.

    Args:
        path: argument of `from_pretrained`.
        dtype: dtype of the parameters, "float32" or "bfloat16".
        gradient_checkpointing: as in `load_policy`.
        seed: seed of the value head, if the folder has none.
        attn_implementation: as in `load_policy`.
        value_head_prefix: prefix of the head: its weights are named `<prefix>.weight`.
        normalize: subtract the `mean` and divide by the `std` in the config.json of a reward model.
        needs_head: raise an error if the folder has no head, instead of creating a random one.
        packing: as in `load_policy`.
        empty: as in `load_policy`. The head is always loaded.

    Raises:
        ValueError: the head has several labels or a bias, is missing though it is needed, mean or std are missing, or
            the model cannot be packed.
    """
    # Faults of configuration and head are found before the weights are read, which may take minutes.
    config = AutoConfig.from_pretrained(path)
    statistics = None
    if normalize:
        statistics = score_statistics(config, path)
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
    # The head is not part of the backbone, so transformers leaves its weights unused without an error.
    backbone, probe = open_model(AutoModel, path, dtype, attn_implementation, empty)
    keep_freed_memory(backbone)
    prepare_attention(backbone, probe, attn_implementation, packing, gradient_checkpointing)
    model = ValueModel(backbone, seed, value_head_prefix, statistics)
    if head_1H is not None:
        with torch.no_grad():
            model.score.weight.copy_(head_1H)
    return model


def _state_size(config: PretrainedConfig) -> int:
    """Return the size of the state that a backbone gives per token. OPT may project it to the size of its
    embeddings.
    """
    text: Any = config.get_text_config()
    return getattr(text, "word_embed_proj_dim", None) or text.hidden_size


def score_statistics(config: PretrainedConfig, path: str | Path) -> tuple[float, float]:
    """Return mean and standard deviation of the scores, which the training of the reward model wrote into config.json.

    Raises:
        ValueError: they are missing, or are not finite with a positive standard deviation.
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
    """Read the value head of a saved value or reward model, [1, H]. Return None if there is none."""
    for file in sorted(model_folder(path).glob("*.safetensors")):
        with TensorReader(file) as weights:
            if f"{prefix}.bias" in weights:
                raise ValueError(
                    f"{path} has a {prefix}.bias: a head of another kind, whose scores would be wrong here; use "
                    "a model that AutoModelForSequenceClassification of a causal architecture wrote"
                )
            if f"{prefix}.weight" in weights:
                return weights.read_tensor(f"{prefix}.weight")
    return None

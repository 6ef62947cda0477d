"""Number of parameters of a model, from the headers of its weight files or its config.json. No weights are loaded.

Sizes that neither of them contains are None and are never guessed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.models.disk.tensor_header import SINGLE, index_of, read_header
from components.models.sources import config_of
from components.net.hub import cached_folder, check_sizes

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_MIXTURES = ("qwen3_moe",)
"""Architectures whose number of parameters follows from config.json alone."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model."""

    parameters: int
    """Number of parameters."""
    head: int = 0
    """Number of parameters of the output layer. 0: the output layer is tied to the embedding."""
    layers: int = 0
    """Number of decoder layers. 0: an unsupported architecture, of which only the number of parameters is known."""
    hidden: int = 0
    """Hidden size."""
    heads: int = 0
    """Number of query heads."""
    queries: int = 0
    """Size of the queries of a token in a layer, over all heads."""
    keys: int = 0
    """Size of the keys of a token in a layer, over all heads. Values have the same size."""
    intermediate: int = 0
    """Intermediate size of the MLP. For a mixture of experts: sum over the experts of a token."""
    vocabulary: int = 0
    """Size of the vocabulary."""
    positions: int = 0
    """Maximum number of tokens of a sequence. 0: no limit."""
    experts: int = 0
    """Number of experts of a layer. 0: the MLP is dense."""
    experts_per_token: int = 0
    """Number of experts that compute each token."""
    mixtures: int = 0
    """Number of layers with experts."""

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of all experts of all layers, without routers."""
        width = self.intermediate // max(1, self.experts_per_token)
        return self.mixtures * self.experts * 3 * self.hidden * width

    @property
    def without_head(self) -> ModelSize:
        """Sizes of the same model without an output layer, as value and reward models have."""
        return replace(self, parameters=self.parameters - self.head, head=0)

    @property
    def rest(self) -> int:
        """Number of parameters outside of layers: the embedding and an untied output layer."""
        return self.vocabulary * self.hidden + self.head


def model_size(path: str) -> ModelSize | None:
    """Return the sizes of a model in a folder or in the local cache of the hub, or of one that a plug-in will create.

    Args:
        path: model path as in the options of a recipe.

    Returns:
        The sizes, or None if they are unknown.
    """
    if (made := config_of(path)) is not None:
        return size_of(made)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = cached_folder(path)
    try:
        check_sizes(folder / "config.json")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        stored = _stored(folder)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        # The recipe checks the model's files and raises an error that names the fault.
        return None
    by_config = size_of(config)
    if stored is None:
        return by_config
    # The files count the parameters exactly. The other sizes are only in config.json.
    shape = vars(by_config or ModelSize(parameters=0))
    return ModelSize(**{**shape, "parameters": stored[0], "head": stored[1]})


def size_of(config: dict[str, Any]) -> ModelSize | None:
    """Return the sizes of a Llama-like decoder, dense or a mixture of experts, from its config.json. None for any other
    architecture.
    """
    needed = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    kind = config.get("model_type")
    if kind in _MIXTURES:
        # transformers writes `num_local_experts` since version 5.
        config = {"num_experts": config.get("num_local_experts")} | config
        needed += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
    else:
        needed.append("intermediate_size")
    if kind not in (*_DENSE, *_MIXTURES) or not all(isinstance(config.get(name), int) for name in needed):
        return None
    hidden, layers, heads, vocabulary = (int(config[name]) for name in needed[:4])
    head_size = config.get("head_dim") or hidden // heads
    key_heads = config.get("num_key_value_heads") or heads
    queries, keys = heads * head_size, key_heads * head_size
    # Biases and norms per layer: qwen2 has biases of queries, keys and values, qwen3 has norms of queries and keys.
    vectors = {"qwen2": queries + 2 * keys, "qwen3": 2 * head_size, "qwen3_moe": 2 * head_size}.get(kind, 0)
    if config.get("attention_bias") and kind != "qwen2":
        vectors += queries + 2 * keys + hidden
    attention = 2 * hidden * (queries + keys) + 2 * hidden + vectors
    head = 0
    if not config.get("tie_word_embeddings"):
        head = vocabulary * hidden
    mlp = _experts(config, layers) if kind in _MIXTURES else _dense(config, layers)
    return ModelSize(
        parameters=vocabulary * hidden + head + layers * attention + mlp["parameters"] + hidden,
        head=head,
        layers=layers,
        hidden=hidden,
        heads=heads,
        queries=queries,
        keys=keys,
        intermediate=mlp["intermediate"],
        vocabulary=vocabulary,
        positions=int(config.get("max_position_embeddings") or 0),
        experts=mlp.get("experts", 0),
        experts_per_token=mlp.get("experts_per_token", 0),
        mixtures=mlp.get("mixtures", 0),
    )


def _dense(config: dict[str, Any], layers: int) -> dict[str, int]:
    """Return the number of parameters of all MLPs, and their intermediate size."""
    hidden, intermediate = int(config["hidden_size"]), int(config["intermediate_size"])
    vectors = 2 * intermediate + hidden if config.get("mlp_bias") else 0
    return {"parameters": layers * (3 * hidden * intermediate + vectors), "intermediate": intermediate}


def _experts(config: dict[str, Any], layers: int) -> dict[str, int]:
    """Return the sizes of the experts and routers of all layers. Some layers may have a dense MLP instead."""
    hidden, width = int(config["hidden_size"]), int(config["moe_intermediate_size"])
    experts, used = int(config["num_experts"]), int(config["num_experts_per_tok"])
    every = int(config.get("decoder_sparse_step") or 1)
    without: set[int] = set(config.get("mlp_only_layers") or ())
    mixtures = sum(layer not in without and (layer + 1) % every == 0 for layer in range(layers))
    parameters = mixtures * experts * (3 * hidden * width + hidden)
    parameters += (layers - mixtures) * 3 * hidden * int(config.get("intermediate_size") or 0)
    sizes = {"parameters": parameters, "intermediate": used * width}
    return sizes | {"experts": experts, "experts_per_token": used, "mixtures": mixtures}


def _stored(folder: Path) -> tuple[int, int] | None:
    """Return the number of parameters in the weight files of a folder, and of the output layer among them, from the
    headers of the files. None if a file is missing.
    """
    index = index_of(folder)
    count = head = 0
    for name in {SINGLE} if index is None else set(index.values()):
        if not (folder / name).is_file():
            return None
        with (folder / name).open("rb") as file:
            _, entries = read_header(file.fileno())
        for tensor, entry in entries.items():
            numbers = math.prod(entry["shape"])
            count += numbers
            if tensor == "lm_head.weight":
                head += numbers
    return count, head

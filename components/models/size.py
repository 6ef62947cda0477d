"""How many numbers a model has, from its weight files' headers or its config.json: nothing is loaded.

What neither tells is None, never a guess.
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
    """Numbers of a model."""

    parameters: int
    head: int = 0
    """Those of them that are an output layer of its own; 0 where it is the embedding's."""
    layers: int = 0
    """Of a decoder; 0: another architecture, of which only the weights are known."""
    hidden: int = 0
    heads: int = 0
    """Of queries."""
    queries: int = 0
    """Numbers of a token's queries in a layer, all heads together."""
    keys: int = 0
    """The same of keys; values have as many."""
    intermediate: int = 0
    """Of the MLP; of a mixture, of all experts of a token together."""
    vocabulary: int = 0
    positions: int = 0
    """Tokens of a sequence, at most; 0: any."""
    experts: int = 0
    """Of a layer of a mixture of experts; 0: the MLP is dense."""
    experts_per_token: int = 0
    mixtures: int = 0
    """Layers with experts."""

    @property
    def expert_parameters(self) -> int:
        """Those of all experts of all layers, without routers."""
        width = self.intermediate // max(1, self.experts_per_token)
        return self.mixtures * self.experts * 3 * self.hidden * width

    @property
    def without_head(self) -> ModelSize:
        """Of the same model without an output layer over the vocabulary: values and scores need none."""
        return replace(self, parameters=self.parameters - self.head, head=0)

    @property
    def rest(self) -> int:
        """Parameters that no layer has: embeddings and an output layer of its own."""
        return self.vocabulary * self.hidden + self.head

    def cut(self, ranks: int) -> ModelSize:
        """What each of so many ranks has that share its layers, as tensor_parallel.py cuts them."""
        rest = self.rest if self.vocabulary % ranks else self.rest // ranks
        whole = 0
        keys = self.keys // ranks
        key_heads = self.keys * self.heads // max(1, self.queries)
        if key_heads % ranks:
            # Each computes all of them, and has some for its query heads.
            whole = 2 * self.layers * self.hidden * self.keys
            keys = self.keys * math.lcm(key_heads, ranks) // (key_heads * ranks)
        return replace(
            self,
            parameters=(self.parameters - self.rest - whole) // ranks + whole + rest,
            head=self.head if self.vocabulary % ranks else self.head // ranks,
            heads=self.heads // ranks,
            queries=self.queries // ranks,
            keys=keys,
            intermediate=self.intermediate // ranks,
            vocabulary=self.vocabulary if self.vocabulary % ranks else self.vocabulary // ranks,
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Numbers that go in and come out of each linear layer of a decoder layer. Experts are none: their weights are
        tensors of three dimensions.
        """
        wide, narrow = self.queries, self.keys
        attention = {"q_proj": (self.hidden, wide), "k_proj": (self.hidden, narrow), "v_proj": (self.hidden, narrow)}
        attention["o_proj"] = (wide, self.hidden)
        if self.experts:
            return attention
        mlp = dict.fromkeys(("gate_proj", "up_proj"), (self.hidden, self.intermediate))
        return attention | mlp | {"down_proj": (self.intermediate, self.hidden)}


def model_size(path: str) -> ModelSize | None:
    """Numbers of the model in a folder or the hub's local cache, or of one that a plug-in still has to make.

    Args:
        path: as a recipe is given it.

    Returns:
        None where nothing is known.
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
        return None  # the recipe's own checks say what is wrong with it
    by_config = size_of(config)
    if stored is None:
        return by_config
    shape = vars(by_config) if by_config else {}
    return ModelSize(**{**shape, "parameters": stored[0], "head": stored[1]})


def size_of(config: dict[str, Any]) -> ModelSize | None:
    """Sizes of a decoder like Llama, dense or a mixture of experts, by its config.json; None of any other."""
    needed = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    kind = config.get("model_type")
    if kind in _MIXTURES:
        # As transformers has written it since version 5.
        config = {"num_experts": config.get("num_local_experts")} | config
        needed += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
    else:
        needed.append("intermediate_size")
    if kind not in (*_DENSE, *_MIXTURES) or not all(isinstance(config.get(name), int) for name in needed):
        return None
    hidden, layers, vocabulary = (int(config[name]) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = int(config["num_attention_heads"])
    head_size = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_size, (config.get("num_key_value_heads") or heads) * head_size
    vectors = {"qwen2": queries + 2 * keys, "qwen3": 2 * head_size, "qwen3_moe": 2 * head_size}.get(kind, 0)
    vectors += queries + 2 * keys + hidden if config.get("attention_bias") and kind != "qwen2" else 0
    attention = 2 * hidden * (queries + keys) + 2 * hidden + vectors
    head = 0 if config.get("tie_word_embeddings") else vocabulary * hidden
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
    """The MLPs of all layers."""
    hidden, intermediate = int(config["hidden_size"]), int(config["intermediate_size"])
    vectors = 2 * intermediate + hidden if config.get("mlp_bias") else 0
    return {"parameters": layers * (3 * hidden * intermediate + vectors), "intermediate": intermediate}


def _experts(config: dict[str, Any], layers: int) -> dict[str, int]:
    """The experts and routers of all layers; some layers may have one dense MLP in their place."""
    hidden, width = int(config["hidden_size"]), int(config["moe_intermediate_size"])
    experts, used = int(config["num_experts"]), int(config["num_experts_per_tok"])
    every = int(config.get("decoder_sparse_step") or 1)
    without: set[int] = set(config.get("mlp_only_layers") or ())
    mixtures = sum(layer not in without and (layer + 1) % every == 0 for layer in range(layers))
    parameters = mixtures * experts * (3 * hidden * width + hidden)
    parameters += (layers - mixtures) * 3 * hidden * int(config.get("intermediate_size") or 0)
    found = {"parameters": parameters, "intermediate": used * width}
    return found | {"experts": experts, "experts_per_token": used, "mixtures": mixtures}


def _stored(folder: Path) -> tuple[int, int] | None:
    """Parameters in the weight files of a folder, and those of its output layer, from their headers; None without such
    files, or where one of them is missing.
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
            head += numbers if tensor == "lm_head.weight" else 0
    return count, head

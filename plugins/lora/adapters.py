"""Low-rank adapters of linear layers, with peft: W + scale * B A, where B and A are trained and W is frozen.

Hu et al. 2021 ("LoRA: Low-Rank Adaptation of Large Language Models"). A is [rank, in]. B is [out, rank] and starts at
0, so that the first outputs equal those of the model. scale = lora_alpha / lora_rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from components.models.value_model import ValueModel
from components.train.config import TrainConfig
from plugins.lora.files import WEIGHTS, layer_of

_ALL = "all-linear"


class LoraAdapters:
    """The adapters of one model, and the weights of the model with the adapters merged into them."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        """Insert adapters into `model` in place, the same on all ranks. Only adapters and a value head stay trainable.

        Args:
            model: policy or value model, possibly empty, before an engine wraps it.
            config: its `lora_...` fields, and the seed of the initial weights.

        Raises:
            ValueError: `lora_target_modules` names a layer that cannot have an adapter.
        """
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        base: Any = model
        self.prefix = ""
        task_type = "CAUSAL_LM"
        if isinstance(model, ValueModel):
            base = model.backbone
            self.prefix = "backbone."
            task_type = None
        targets = _targets(base, config.lora_target_modules)
        self.config = LoraConfig(
            r=config.lora_rank,
            # The scale is a ratio, so lora_alpha may be a float. peft accepts it, although its annotation says int.
            lora_alpha=config.lora_alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=config.lora_dropout,
            target_modules=targets,
            fan_in_fan_out=not isinstance(base.get_submodule(targets[0]), nn.Linear),
            base_model_name_or_path=base.name_or_path,
            task_type=task_type,
        )
        with torch.random.fork_rng(), _on_cpu(base.get_submodule(name) for name in targets):
            # All ranks need the same adapters, and other random numbers of the run must not change.
            torch.manual_seed(config.seed)
            inject_adapter_in_model(self.config, base)
        # peft stores a set, which would be written in another order each time.
        self.config.target_modules = targets
        self.layers: dict[str, Any] = {
            n: module for n, module in model.named_modules() if isinstance(module, LoraLayer)
        }
        """Layers that have an adapter, by name."""
        # Adapters are trained in float32 even if the frozen weights are bfloat16: small updates would be rounded away.
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()
        if config.lora_path:
            self._load(model, Path(config.lora_path).expanduser())
        names = ("lora_rank", "lora_alpha", "lora_target_modules")
        self.note = {name: getattr(config, name) for name in names}
        """Settings that must be equal in a saved training state."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's two matrices."""
        return self.note["lora_alpha"] / self.note["lora_rank"]

    def _load(self, model: nn.Module, folder: Path) -> None:
        """Load the initial adapters from a folder.

        Raises:
            ValueError: they belong to other layers or have other shapes than those of the model.
        """
        from safetensors.torch import load_file

        saved = {name.replace(".default.", "."): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        parameters = dict(self.named(model.named_parameters()))
        if different := sorted(saved.keys() ^ parameters.keys()):
            place = "the model"
            if different[0] in saved:
                place = "the folder"
            raise ValueError(
                f"lora_path={folder}: {layer_of(different[0])} has an adapter in {place} alone ({len(different)} "
                f"tensors differ); the adapters are of another model than {self._name}"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                if parameter.shape != saved[name].shape:
                    raise ValueError(
                        f"lora_path={folder}: {name} has shape {list(saved[name].shape)}, and the model needs "
                        f"{list(parameter.shape)}; the adapters are of another model than {self._name}"
                    )
                parameter.copy_(saved[name])

    @property
    def _name(self) -> str:
        return str(self.config.base_model_name_or_path)

    def named(self, trained: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters among the trained tensors, with the names that peft's files use."""
        for name, tensor in trained:
            if ".lora_" in name:
                yield "base_model.model." + name.removeprefix(self.prefix).replace(".default.", "."), tensor

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters inside the context, so that passes are those of the initial model."""
        # peft's `enable_adapters` would also change `requires_grad`, after the engine has sharded the parameters by it.
        for layer in self.layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer._disable_adapters = False

    def merged(
        self, frozen: Iterable[tuple[str, Tensor]], trained: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of an equivalent model without adapters, by the names and in the dtypes of the model.

        Args:
            frozen: full parameters that are not trained, by their names in the model. Empty on ranks other than 0.
            trained: full trained parameters. Adapters are merged, others are returned unchanged. Empty on ranks other
                than 0.
        """
        for name, weight in frozen:
            layer, _, kind = name.rpartition(".base_layer.")
            if layer in self.layers and kind == "weight":
                yield f"{layer}.weight", self._added(layer, weight, trained)
            else:
                yield name.replace(".base_layer.", "."), weight
        yield from ((name, weight) for name, weight in trained.items() if ".lora_" not in name)

    def _added(self, layer: str, weight: Tensor, trained: Mapping[str, Tensor]) -> Tensor:
        up, down = (trained[f"{layer}.lora_{side}.default.weight"].float() for side in "BA")
        module = self.layers[layer]
        # In float32: a change is often smaller than the rounding of a bfloat16 weight.
        change = (up @ down).mul_(module.scaling["default"])
        # GPT-2's layers store their weights as [in, out].
        if module.fan_in_fan_out:
            change = change.T
        return (weight + change).to(weight.dtype)

    def save(self, folder: Path, trained: Mapping[str, Tensor]) -> None:
        """Write the adapters so that `PeftModel.from_pretrained(model, folder)` loads them into the initial model.

        Args:
            folder: created if missing.
            trained: see `merged`. A value head is not written.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(str(folder))
        weights = {name: tensor.contiguous() for name, tensor in self.named(trained.items())}
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@contextmanager
def _on_cpu(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Replace weights on the meta device inside the context, because peft creates an adapter on its weight's device."""
    empty = [
        (layer, layer.weight) for layer in layers if isinstance(layer.weight, nn.Parameter) and layer.weight.is_meta
    ]
    for layer, weight in empty:
        # A tensor with the same shape and without memory for it.
        layer.weight = nn.Parameter(torch.empty((), dtype=weight.dtype).expand(weight.shape))
    try:
        yield
    finally:
        for layer, weight in empty:
            placeholder: Any = layer.weight
            layer.weight = weight.requires_grad_(placeholder.requires_grad)


def _targets(base: Any, selection: str) -> list[str]:
    """Return the names of the selected linear layers, in the order of the model.

    Args:
        base: model without a value head.
        selection: value of `lora_target_modules`: comma-separated endings of names, or "all-linear".

    Raises:
        ValueError: an ending matches no linear layer, or a layer shares its weight with the token embedding.
    """
    from transformers.pytorch_utils import Conv1D

    head = base.get_output_embeddings()
    linear = {name: module for name, module in base.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if selection == _ALL:
        return [name for name, module in linear.items() if module is not head]
    chosen: dict[str, None] = {}
    for ending in filter(None, (part.strip() for part in selection.split(","))):
        matches = [name for name in linear if name == ending or name.endswith(f".{ending}")]
        if not matches:
            endings = sorted({name.rpartition(".")[2] for name in linear})
            raise ValueError(
                f"lora_target_modules={selection!r}: no linear layer of {type(base).__name__} is called {ending!r}; "
                f"there are {', '.join(endings)}; or set {_ALL}"
            )
        chosen |= dict.fromkeys(matches)
    shared = base.get_input_embeddings().weight
    # A merged adapter would change the embedding too.
    tied = [name for name in chosen if linear[name].weight is shared]
    if tied:
        raise ValueError(
            f"lora_target_modules={selection!r}: {tied[0]} shares its weight with the embedding of the tokens, and an "
            "adapter of one alone cannot be merged; leave it out"
        )
    return list(chosen)

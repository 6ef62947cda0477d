"""Low-rank adapters of linear layers, by peft: W + scale * B A, of which B and A are trained and W stays as it is.

Hu et al. 2021 ("LoRA: Low-Rank Adaptation of Large Language Models"). A is [rank, in], B is [out, rank] and 0 at the
start, so that the first outputs are the model's own; scale = lora_alpha / lora_rank.
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
    """The adapters of one model: where they are, and what the model is with them added to its weights."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        """Put adapters into `model`, in place, the same on all ranks. Only they keep their gradients, and a value head.

        Args:
            model: policy or value model, perhaps made empty, and not under an engine yet.
            config: its `lora_...` fields, and the seed of the first weights.

        Raises:
            ValueError: `lora_target_modules` names what can have no adapter.
        """
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        base: Any = model.backbone if isinstance(model, ValueModel) else model
        targets = _targets(base, config.lora_target_modules)
        self.prefix = "backbone." if isinstance(model, ValueModel) else ""
        self.config = LoraConfig(
            r=config.lora_rank,
            # The scale is a ratio: peft takes any number, whatever its annotation says.
            lora_alpha=config.lora_alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=config.lora_dropout,
            target_modules=targets,
            fan_in_fan_out=not isinstance(base.get_submodule(targets[0]), nn.Linear),
            base_model_name_or_path=base.name_or_path,
            task_type=None if self.prefix else "CAUSAL_LM",
        )
        with torch.random.fork_rng(), _on_cpu(base.get_submodule(name) for name in targets):
            torch.manual_seed(config.seed)
            inject_adapter_in_model(self.config, base)
        # peft writes down a set, in another order each time.
        self.config.target_modules = targets
        self.layers: dict[str, Any] = {
            n: module for n, module in model.named_modules() if isinstance(module, LoraLayer)
        }
        """Layers that have an adapter, by name."""
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()
        if config.lora_path:
            self._load(model, Path(config.lora_path).expanduser())
        names = ("lora_rank", "lora_alpha", "lora_target_modules")
        self.note = {name: getattr(config, name) for name in names}
        """Settings that a saved state has to agree with."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's two matrices."""
        return self.note["lora_alpha"] / self.note["lora_rank"]

    def _load(self, model: nn.Module, folder: Path) -> None:
        """Begin with the adapters of a folder.

        Raises:
            ValueError: they are of other layers, or have other shapes, than those of the model.
        """
        from safetensors.torch import load_file

        there = {name.replace(".default.", "."): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        here = dict(self.named(model.named_parameters()))
        if different := sorted(there.keys() ^ here.keys()):
            where = "the folder" if different[0] in there else "the model"
            raise ValueError(
                f"lora_path={folder}: {layer_of(different[0])} has an adapter in {where} alone ({len(different)} "
                f"tensors differ); the adapters are of another model than {self._name}"
            )
        with torch.no_grad():
            for name, parameter in here.items():
                if parameter.shape != there[name].shape:
                    raise ValueError(
                        f"lora_path={folder}: {name} has shape {list(there[name].shape)}, and the model needs "
                        f"{list(parameter.shape)}; the adapters are of another model than {self._name}"
                    )
                parameter.copy_(there[name])

    @property
    def _name(self) -> str:
        return str(self.config.base_model_name_or_path)

    def named(self, trained: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Return the adapters among the trained tensors, by the names of peft's files."""
        for name, tensor in trained:
            if ".lora_" in name:
                yield "base_model.model." + name.removeprefix(self.prefix).replace(".default.", "."), tensor

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, passes are those of the model that training started from."""
        # Not peft's `enable_adapters`, which changes too what has a gradient, under the hands of the library that has
        # partitioned it.
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
        """The weights of the model without adapters that computes the same, by its names and in its types.

        Args:
            frozen: whole parameters that are not trained, by their names in the model; none on ranks other than 0.
            trained: whole ones that are, of which the adapters are added and others come as they are; none there too.
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
        change = (up @ down).mul_(module.scaling["default"])
        # GPT-2's layers keep their weights as [in, out].
        return (weight + (change.T if module.fan_in_fan_out else change)).to(weight.dtype)

    def save(self, folder: Path, trained: Mapping[str, Tensor]) -> None:
        """Write what `PeftModel.from_pretrained(model, folder)` loads into the model that training started from.

        Args:
            folder: made when missing.
            trained: as for `merged`. A value head is not written.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(str(folder))
        weights = {name: tensor.contiguous() for name, tensor in self.named(trained.items())}
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@contextmanager
def _on_cpu(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, weights on the meta device seem to be on the CPU: peft makes an adapter where the weight is."""
    empty = [
        (layer, layer.weight) for layer in layers if isinstance(layer.weight, nn.Parameter) and layer.weight.is_meta
    ]
    for layer, weight in empty:
        # Of the same shape, and without memory.
        layer.weight = nn.Parameter(torch.empty((), dtype=weight.dtype).expand(weight.shape))
    try:
        yield
    finally:
        for layer, weight in empty:
            seeming: Any = layer.weight
            layer.weight = weight.requires_grad_(seeming.requires_grad)


def _targets(base: Any, wanted: str) -> list[str]:
    """Names of the linear layers that are wanted, in the order of the model."""
    from transformers.pytorch_utils import Conv1D

    head = base.get_output_embeddings()
    linear = {name: module for name, module in base.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if wanted == _ALL:
        return [name for name, module in linear.items() if module is not head]
    chosen: dict[str, None] = {}
    for ending in filter(None, (part.strip() for part in wanted.split(","))):
        found = [name for name in linear if name == ending or name.endswith(f".{ending}")]
        if not found:
            endings = sorted({name.rpartition(".")[2] for name in linear})
            raise ValueError(
                f"lora_target_modules={wanted!r}: no linear layer of {type(base).__name__} is called {ending!r}; there "
                f"are {', '.join(endings)}; or set {_ALL}"
            )
        chosen |= dict.fromkeys(found)
    shared = base.get_input_embeddings().weight
    tied = [name for name in chosen if linear[name].weight is shared]
    if tied:
        raise ValueError(
            f"lora_target_modules={wanted!r}: {tied[0]} shares its weight with the embedding of the tokens, and an "
            "adapter of one alone cannot be merged; leave it out"
        )
    return list(chosen)

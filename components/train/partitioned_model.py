"""Gathering, export and offloading of a trained model whose parameters may be sharded over the ranks."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from components.models.disk.export import save_model
from components.registry import load
from components.train.adapters import Adapters
from components.train.collective_io import disk_errors
from components.train.config import TrainConfig
from components.weights.bucket_sizes import BUCKET_BYTES
from components.weights.gather import Bucket, Part, gathered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class WeightAverage(Protocol):
    """Average of the trained master weights. A plug-in provides it."""

    tensors: dict[str, Tensor]
    """Averages by name, float32, on the CPU of rank 0. Empty on other ranks."""

    def follow(self, engine: PartitionedModel) -> None:
        """Update the average after an optimizer step of the engine. All ranks must call this."""
        ...

    def restart(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Set the average to these tensors."""
        ...


class PartitionedModel(ABC):
    """Parameters of one model with one optimizer. All ranks must make the same calls in the same order."""

    config: TrainConfig
    model: nn.Module
    """Model. Outside of passes, its sharded parameters are empty or shards."""
    rank: int
    world_size: int
    device: torch.device
    step_count = 0
    adapters: Adapters | None
    average: WeightAverage | None = None
    """Average of the trained master weights, or None without `ema_beta`."""
    _asleep: Any = None
    adam: torch.optim.AdamW
    """Optimizer over the parameters (ZeRO 0) or this rank's shards of them."""

    @abstractmethod
    def _part(self, parameter: nn.Parameter, dtype: torch.dtype) -> Part:
        """Return this rank's shard of a parameter, to be gathered in this dtype. All ranks must call this."""

    @property
    def zero(self) -> Any:
        """DeepSpeed's ZeRO optimizer around `adam`, which steps all parameters together. None with zero_stage 0, and
        for other engines.
        """
        return None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that are saved and averaged: all of them, or with adapters only the trained ones."""
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad or self.adapters is None}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers of the model, which are saved with it."""
        persistent = self.model.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in persistent}

    def _start_average(self) -> None:
        if self.config.ema_beta is not None:
            self.average = load("weight average", "ema", "train.ema_beta")(self.config.ema_beta, self)

    def gathered_parameters(self, bucket_type: type[Bucket] = Bucket) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole parameters by name on the CPU of rank 0, with bf16 in bfloat16. Tied parameters are yielded
        once, under their first name.

        Adapters are merged into the weights beneath them, so the names are those of the model without adapters.

        Every rank must exhaust the iterator, because gathering is collective. Ranks other than 0 get no items.
        A tensor may be the parameter itself, and is valid until the next `train_step`.

        Args:
            bucket_type: class that gathers them. `EverywhereBucket` yields them on every rank, on its device; only for
                models without adapters.
        """
        trained = self._gather(self.parameters.items(), bucket_type)
        if self.adapters is None:
            yield from trained
        else:
            yield from self.adapters.merged(self._frozen(), dict(trained))

    def gathered_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters by the names of peft's files, in the same way as `gathered_parameters`.

        Raises:
            ValueError: the model has no adapters.
        """
        if self.adapters is None:
            raise ValueError("the model has no adapters; set lora_rank")
        yield from self.adapters.named(self._gather(self.parameters.items()))

    def _gather(
        self, parameters: Iterable[tuple[str, nn.Parameter]], bucket_type: type[Bucket] = Bucket
    ) -> Iterator[tuple[str, Tensor]]:
        # While the engine sleeps its storages are empty, and a collective would read freed memory.
        self.check_awake()
        parts = ((name, self._part(parameter, self._type(parameter))) for name, parameter in parameters)
        return gathered(parts, self.device, BUCKET_BYTES[self.device.type], bucket_type)

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        return self._gather((name, p) for name, p in self.model.named_parameters() if not p.requires_grad)

    def save_hf(self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Write a folder that `from_pretrained` loads. All ranks must call this; rank 0 writes.

        The folder contains the parameters that `gathered_parameters` yields, or with `ema_beta` the average of the
        weights in the same dtype. The subfolder `adapter` contains the adapters in peft's format, for use with the
        model that training started from.

        Args:
            path: path to the folder, which is created if it is missing.
            tokenizer: tokenizer that is saved into the same folder, or None.

        Raises:
            OSError: rank 0 cannot write to the folder. All ranks have finished gathering then.
        """
        self.check_awake()
        weights, adapters = self._exported()
        tensors = dict(self._shapes())
        try:
            if self.rank == 0:
                with disk_errors(f"write {path}"):
                    save_model(Path(path), self.model, tensors, weights)
                    if self.adapters is not None:
                        self.adapters.save(Path(path) / "adapter", adapters)
                    if tokenizer is not None:
                        tokenizer.save_pretrained(path)
        finally:
            # Gathering is collective: after an error here, the other ranks would wait for this one forever.
            for _ in weights:
                pass

    def _exported(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Tensor]]:
        """Return the weights that `save_hf` writes, and the trained adapters (empty without adapters)."""
        parameters = self.parameters
        averaged: Iterable[tuple[str, Tensor]] = self.average.tensors.items() if self.average is not None else ()
        in_type = ((name, tensor.to(self._type(parameters[name]))) for name, tensor in averaged)
        trained = self._gather(parameters.items()) if self.average is None else in_type
        if self.adapters is None:
            return itertools.chain(trained, self._buffers()), {}
        # Merging needs any adapter at any time, while the frozen weights arrive one by one.
        adapters = dict(trained)
        return itertools.chain(self.adapters.merged(self._frozen(), adapters), self._buffers()), adapters

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Return the buffers that are saved with a model, on rank 0."""
        return iter(self.buffers.items() if self.rank == 0 else ())

    def _shapes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names, shapes and dtypes of the tensors from `_exported`, as meta tensors."""
        for name, parameter in self.model.named_parameters():
            if self.adapters is None or ".lora_" not in name:
                # peft moves an adapted layer to `base_layer`. Exports have the names of the model without adapters.
                plain = name.replace(".base_layer.", ".")
                yield plain, torch.empty(whole_shape(parameter), dtype=self._type(parameter), device="meta")
        for name, buffer in self.buffers.items():
            yield name, buffer.to("meta")

    def sleep(self) -> int:
        """Move all tensors of the engine from the GPU to host memory until `wake`. No other method can be used
        meanwhile.

        Returns:
            Number of bytes of GPU memory that were freed. 0 on a CPU, where nothing is moved.
        """
        if self._asleep is None:
            # Loaded at the first sleep, because most learners never sleep.
            host_copies = load("sleep", "host copies", "placement.learners_sleep=true")
            self._asleep = host_copies(self._tensors(), self._scratch())
        return self._asleep.nbytes

    def wake(self) -> None:
        """Move the tensors back to the GPU after `sleep`. Does nothing if the engine is awake."""
        if self._asleep is not None:
            self._asleep.restore()
        self._asleep = None

    def check_awake(self) -> None:
        """Raise a ValueError if the engine is asleep."""
        if self._asleep is not None:
            raise ValueError("the training engine is asleep, and what it holds is in host memory; call wake() first")

    def _scratch(self) -> Iterable[Tensor]:
        """Return buffers whose content is not needed between two steps, but which take device memory."""
        return ()

    def _tensors(self) -> Iterator[Tensor]:
        """Return the tensors that the next step needs."""
        # The master weights. With bf16 they are other tensors than the parameters of the model.
        for group in self.adam.param_groups:
            yield from group["params"]
        for moments in self.adam.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))
        yield from self.model.buffers()
        for parameter in self.model.parameters():
            # DeepSpeed keeps this rank's shard of a sharded parameter in `ds_tensor`.
            parts = parameter, parameter.grad, getattr(parameter, "ds_tensor", None)
            yield from (part for part in parts if part is not None)

    def _type(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which passes use a parameter. Its master weight may have another dtype."""
        return torch.bfloat16 if self.config.precision == "bf16" else parameter.dtype


def whole_shape(tensor: Any) -> torch.Size:
    """Return the shape of the whole parameter, of which this rank may have a shard."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))

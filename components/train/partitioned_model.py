"""A model whose parameters are trained and may be partitioned over the ranks: gathered, exported, saved, resumed, and
moved to host memory.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from components.models.disk.export import save_model
from components.train.adapters import Adapters
from components.train.collective_io import disk_errors
from components.train.config import TrainConfig
from components.train.host_memory import HostCopies
from components.train.state import EngineState, whole_shape
from components.train.weight_average import WeightAverage
from components.weights.bucket_sizes import BUCKET_BYTES
from components.weights.gather import Part, gathered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PartitionedModel(ABC):
    """The parameters of one model under one optimizer. All ranks make the same calls in the same order."""

    config: TrainConfig
    model: nn.Module
    """Partitioned parameters are empty, or parts, outside of passes."""
    rank: int
    world_size: int
    device: torch.device
    step_count = 0
    adapters: Adapters | None
    average: WeightAverage | None = None
    """Average of the master weights that are trained, when the config asks for it."""
    _asleep: HostCopies | None = None
    _adam: torch.optim.AdamW

    @abstractmethod
    def _part(self, parameter: nn.Parameter, dtype: torch.dtype) -> Part:
        """Return this rank's part of a parameter, to be gathered in this type. All ranks call this."""

    @property
    def _zero(self) -> Any:
        """DeepSpeed's optimizer around AdamW, where there is one."""
        return None

    def _state(self) -> EngineState:
        """Return the state of this engine, where it lies."""
        adapters = None if self.adapters is None else self.adapters.note
        return EngineState(self.model, self._adam, self._zero, self.config, self.device, self.average, adapters)

    def _start_average(self) -> None:
        if self.config.ema_beta is not None:
            self.average = WeightAverage(self.config.ema_beta, self._state().master_weights())

    def gathered_parameters(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The whole parameters, by name, on rank 0's CPU; tied ones once, under their first name. bf16: in bfloat16.

        Adapters are added to the weights beneath them: names and number are those of the model without adapters.

        Every rank must exhaust the iterator, since gathering is collective; ranks other than 0 get no items.
        A tensor may be the live parameter: it is valid until the next train_step.

        Args:
            everywhere: on every rank and its device; of a model without adapters.
        """
        trained = self._gather(self._state().parameters.items(), everywhere)
        if self.adapters is None:
            yield from trained
        else:
            yield from self.adapters.merged(self._frozen(), dict(trained))

    def gathered_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters alone, as `gathered_parameters` gives parameters, by the names of peft's files.

        Raises:
            ValueError: the model has none.
        """
        if self.adapters is None:
            raise ValueError("the model has no adapters; set lora_rank")
        yield from self.adapters.named(self._gather(self._state().parameters.items()))

    def _gather(
        self, parameters: Iterable[tuple[str, nn.Parameter]], everywhere: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        self._check_awake()
        parts = ((name, self._part(parameter, self._type(parameter))) for name, parameter in parameters)
        return gathered(parts, self.device, BUCKET_BYTES[self.device.type], everywhere)

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        return self._gather((name, p) for name, p in self.model.named_parameters() if not p.requires_grad)

    def save_hf(self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Write a folder that `from_pretrained` loads. All ranks call this; rank 0 writes.

        It has the parameters as `gathered_parameters` gives them; with `ema_beta` the average of the weights, in the
        same type, instead of the weights. The adapters by themselves are in its folder `adapter`, as peft writes them,
        for the model that training started from.

        Args:
            path: folder, made when missing.
            tokenizer: saved into the same folder.

        Raises:
            OSError: rank 0 cannot write there. The ranks are through with gathering then.
        """
        self._check_awake()
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
            # The other ranks gather to the end, whatever happens here.
            for _ in weights:
                pass

    def _exported(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Tensor]]:
        """The weights as `save_hf` writes them, and what is trained beside weights that are not."""
        parameters = self._state().parameters
        averaged: Iterable[tuple[str, Tensor]] = self.average.tensors.items() if self.average is not None else ()
        in_type = ((name, tensor.to(self._type(parameters[name]))) for name, tensor in averaged)
        trained = self._gather(parameters.items()) if self.average is None else in_type
        if self.adapters is None:
            return itertools.chain(trained, self._buffers()), {}
        adapters = dict(trained)
        return itertools.chain(self.adapters.merged(self._frozen(), adapters), self._buffers()), adapters

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Return the buffers that are saved with a model, on rank 0."""
        return iter(self._state().buffers.items() if self.rank == 0 else ())

    def _shapes(self) -> Iterator[tuple[str, Tensor]]:
        """Names, shapes and types of what `_exported` gives, on the meta device."""
        for name, parameter in self.model.named_parameters():
            if self.adapters is None or ".lora_" not in name:
                plain = name.replace(".base_layer.", ".")
                yield plain, torch.empty(whole_shape(parameter), dtype=self._type(parameter), device="meta")
        for name, buffer in self._state().buffers.items():
            yield name, buffer.to("meta")

    def save_state(self, folder: str | Path) -> None:
        """Write everything that training resumes from. All ranks call this, and each writes a share.

        The float32 master weights, AdamW's moments and step numbers, `step_count`, the model's persistent buffers,
        each rank's random state, and the average of the weights if there is one. Call it between two train_steps, and
        not after an error of one. With adapters only what is trained is written.

        Args:
            folder: on a file system that all ranks see; made when missing. What it has of an older state is replaced.

        Raises:
            OSError: some rank cannot write. On all ranks, each of which may continue.
        """
        self._check_awake()
        self._state().save(Path(folder), self.step_count)

    def load_state(self, folder: str | Path) -> list[str]:
        """Continue exactly where `save_state` was called. All ranks call this, and each reads what it needs.

        The engine is one just made from the same architecture; its own weights do not matter, but those beneath
        adapters have to be the same. Learning rate,
        schedule, AdamW's settings and `ema_beta` are those of its config. Load after the last engine of a process was
        made, because making one seeds the generator that dropout draws from.

        With the settings it was saved with, training continues to the last bit. With other ranks or another zero_stage
        the state is the same to the last bit, and later results differ by the order of sums; with other ranks dropout
        starts anew from the config's seed, and all ranks get the buffers of rank 0.

        Returns:
            What will not be exact, a sentence each; nothing when all is.

        Raises:
            ValueError: the folder is not whole, or the state of another model or of other adapters. On all ranks.
            OSError: some rank cannot read. On all ranks.
        """
        self._check_awake()
        self.step_count, inexact = self._state().load(Path(folder))
        return inexact

    def sleep(self) -> int:
        """Move all that this engine has on a GPU to host memory, until `wake`; nothing else can be asked meanwhile.

        Returns:
            Bytes of GPU memory that were given back. 0 on a CPU, where nothing is moved.
        """
        if self._asleep is None:
            self._asleep = HostCopies(self._tensors(), self._scratch())
        return self._asleep.nbytes

    def wake(self) -> None:
        """Bring back what `sleep` moved; nothing happens when the engine is awake."""
        if self._asleep is not None:
            self._asleep.restore()
        self._asleep = None

    def _check_awake(self) -> None:
        if self._asleep is not None:
            raise ValueError("the training engine is asleep, and what it holds is in host memory; call wake() first")

    def _scratch(self) -> Iterable[Tensor]:
        """Return tensors whose content is not needed between two steps, though they take memory."""
        return ()

    def _tensors(self) -> Iterator[Tensor]:
        """Return the tensors that the next step needs."""
        state = self._state()
        for group in state.adam.param_groups:
            yield from group["params"]
        for moments in state.adam.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))
        yield from self.model.buffers()
        for parameter in self.model.parameters():
            # ds_tensor: this rank's part, where DeepSpeed has partitioned it.
            parts = parameter, parameter.grad, getattr(parameter, "ds_tensor", None)
            yield from (part for part in parts if part is not None)

    def _type(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the type in which passes use a parameter; its master weight may have another."""
        return torch.bfloat16 if self.config.precision == "bf16" else parameter.dtype

"""Reading of the training state that `save_state` of components/train/state.py writes."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from components.models.disk.tensor_file import TensorReader
from components.process.heartbeat import beat
from components.train.collective_io import CollectiveIO
from components.train.partitioned_model import PartitionedModel, whole_shape
from components.train.state import FORMAT, MOMENTS, NOTE, EngineState, Part, is_zeros, row_pieces

CONSEQUENCES = {
    "engine": "gradients are added in another order",
    "zero_stage": "gradients are added in another order",
    "precision": "the master weights are the same, but forward and backward passes round differently",
    "adam_offload": "gradients are added in another order",
    "context": "gradients are added in another order",
    "tensor": "gradients are added in another order",
    "expert": "gradients are added in another order",
    "device": "its kernels round differently, and dropout starts anew",
}
"""Consequence, by setting, of loading a state that was saved with another value."""


def load_state(engine: PartitionedModel, folder: str | Path) -> list[str]:
    """Resume from a state that `save_state` wrote. All ranks must call this, and each reads what it needs.

    Call it on a new engine of the same architecture. Its weights are replaced, except for the weights beneath
    adapters, which must be the same. Learning rate, schedule, AdamW's settings and `ema_beta` are taken from its
    configuration. Load after all engines of the process have been created, because creating one seeds the generator
    that dropout uses.

    With the settings of the saved state, training continues bit by bit. With another number of ranks or another
    zero_stage the loaded state is identical, and later results differ by the order of sums. With another number of
    ranks, dropout also restarts from the seed of the configuration, and all ranks get the buffers of rank 0.

    Returns:
        A list of notes about state that could not be restored exactly. Empty if everything is exact.

    Raises:
        ValueError: the folder is incomplete, or is the state of another model or of other adapters. It is raised on
            all ranks.
        OSError: a rank cannot read a file. It is raised on all ranks.
    """
    engine.check_awake()
    engine.step_count, inexact = EngineReader(engine).load(Path(folder))
    return inexact


@dataclass(frozen=True)
class _Saved:
    """Open folder of a saved state."""

    note: dict[str, Any]
    """Content of engine.json."""
    readers: dict[str, TensorReader]
    """Reader of each file by its name."""
    rank_reader: TensorReader
    """Reader of this rank's random state and buffers; of rank 0's, if another number of ranks saved the state."""


@dataclass(frozen=True)
class EngineReader(EngineState):
    """Reader of the training state of one engine. All ranks must make the same calls in the same order."""

    def load(self, folder: Path) -> tuple[int, list[str]]:
        """Load the state. Nothing is changed before all ranks have checked that the folder is complete.

        Returns:
            The number of optimizer steps, and a list of notes about state that could not be restored exactly.

        Raises:
            ValueError: the folder is incomplete, or is the state of another model or of other adapters.
            OSError: a rank cannot read a file.
        """
        with ExitStack() as stack:
            io = CollectiveIO(f"read {folder}")
            saved = io.run(lambda: self._open(folder, stack))
            io.end()
            assert saved is not None
            if saved.note["beneath"] != self._sum_beneath():
                raise ValueError(
                    f"the adapters in {folder} were trained on other weights than those beneath them here; make the "
                    "engine from the model that training started from"
                )
            self._fill(saved)
        self._refresh()
        if self.engine.average is not None and saved.note["average"] is None:
            self.engine.average.restart(self.master_weights())
        return saved.note["step_count"], self._remarks(saved.note)

    def _open(self, folder: Path, stack: ExitStack) -> _Saved:
        """Open all files of a saved state.

        Raises:
            ValueError: the state is incomplete, or of another model or of other adapters.
        """
        note = _read_note(folder)
        _same_adapters(folder, note["adapters"], self.adapters)
        _same_model(folder, "parameter", note["parameters"], self.engine.parameters)
        _same_model(folder, "buffer", note["buffers"], self.engine.buffers)
        rank_file = f"own_{self.rank if note['world_size'] == self.world_size else 0}.safetensors"
        shapes: dict[str, dict[str, list[int]]] = defaultdict(dict)
        """Shapes of the tensors that each file must contain."""
        for name, entry in note["parameters"].items():
            for key in ("weight",) if entry["adam_step"] is None else ("weight", *MOMENTS):
                shapes[entry["file"]][f"{name}/{key}"] = entry["shape"]
            if note["average"]:
                shapes[note["average"]][f"{name}/average"] = entry["shape"]
        shapes[rank_file] = {f"{name}/buffer": entry["shape"] for name, entry in note["buffers"].items()}
        readers = {file: stack.enter_context(_open(folder / file, of)) for file, of in sorted(shapes.items())}
        return _Saved(note, readers, readers[rank_file])

    @torch.no_grad()
    def _fill(self, saved: _Saved) -> None:
        for name, parameter in self.engine.parameters.items():
            part = self._part(parameter)
            if part is not None:
                self._fill_part(name, parameter, part, saved)
        for name, buffer in self.engine.buffers.items():
            buffer.copy_(saved.rank_reader.read_tensor(f"{name}/buffer"))
        average = saved.note["average"]
        if self.engine.average is not None and average:
            reader = saved.readers[average]
            self.engine.average.restart(
                (name, reader.read_tensor(f"{name}/average")) for name in self.engine.average.tensors
            )
        # With another number of ranks there is no random state for each rank, and dropout restarts from the seed.
        if saved.note["world_size"] == self.world_size:
            torch.set_rng_state(saved.rank_reader.read_tensor("cpu/random"))
            if self.engine.device.type == saved.note["device"] == "cuda":
                torch.cuda.set_rng_state(saved.rank_reader.read_tensor("cuda/random"))

    def _fill_part(self, name: str, parameter: nn.Parameter, part: Part, saved: _Saved) -> None:
        beat()
        entry = saved.note["parameters"][name]
        reader = saved.readers[entry["file"]]
        _fill_shard(part, reader, f"{name}/weight", into=part.flat)
        # ZeRO has one step number for all parameters. A parameter without a gradient has no moments in a state that was
        # saved without ZeRO, and then takes the step number of the others.
        step = saved.note["adam_step"] if is_zeros(parameter) else entry["adam_step"]
        # AdamW initializes its state at the first step. Moments that this engine has already would be wrong.
        if step is None or not parameter.requires_grad:
            self.engine.adam.state.pop(part.flat, None)
            return
        state = self.engine.adam.state[part.flat]
        state["step"] = torch.tensor(float(step), device=part.flat.device)
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(part.flat)
            if entry["adam_step"] is None:
                part.view(state[key]).zero_()
            else:
                _fill_shard(part, reader, f"{name}/{key}", into=state[key])

    def _remarks(self, note: dict[str, Any]) -> list[str]:
        remarks = []
        if note["world_size"] != self.world_size:
            remarks.append(
                f"saved by {note['world_size']} rank(s), loaded by {self.world_size}: gradients are added in another "
                "order, and dropout starts anew from its seed"
            )
        for name, value in self._settings().items():
            # States of older versions have no parallel degrees, which were 1 then.
            if (saved := note.get(name, 1)) != value:
                remarks.append(f"saved with {name}={saved}, loaded with {name}={value}: {CONSEQUENCES[name]}")
        if self.engine.average is not None and note["average"] is None:
            remarks.append("saved without an average of the weights: the average starts from the weights loaded")
        if self.engine.average is None and note["average"] is not None:
            remarks.append("saved with an average of the weights, loaded without one: the average is left out")
        steps = {entry["adam_step"] for entry in note["parameters"].values() if entry["adam_step"] is not None}
        if len(steps) > 1 and self.engine.zero is not None:
            remarks.append(
                f"AdamW had stepped some parameters {min(steps)} times and others {max(steps)}, and ZeRO counts once: "
                f"all resume from {max(steps)}"
            )
        return remarks

    def _refresh(self) -> None:
        """Copy the master weights to the weights that passes use, as DeepSpeed does at the end of a step."""
        if self.engine.zero is None:
            return
        if self.engine.config.stage == 3:
            self.engine.zero._partition_all_parameters()
            for group in range(len(self.engine.zero.fp16_groups)):
                self.engine.zero._reassign_or_swap_out_partitioned_parameters(group)
            self.engine.zero._post_step(set())
        else:
            self.engine.zero.update_lp_params()


def _fill_shard(part: Part, reader: TensorReader, name: str, into: Tensor) -> None:
    """Read the shard of a tensor from a file, one piece at a time.

    Args:
        part: the shard.
        reader: reader of the file.
        name: name of the tensor in the file.
        into: `flat`, or a moment of the same shape.
    """
    target, block = part.view(into), part.block
    for first, last in row_pieces(block.rows, block.columns):
        piece = reader.block(name, replace(block, row=block.row + first, rows=last - first))
        target[first:last].copy_(piece.view(last - first, block.columns))


def _read_note(folder: Path) -> dict[str, Any]:
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} has no {NOTE}: it is no state of an engine, or its saving was cut short; take another one"
        ) from None
    except ValueError as error:
        raise ValueError(f"{folder / NOTE} is not what save_state writes ({error}); take another state") from error
    saved = note.get("format")
    if saved != FORMAT:
        raise ValueError(f"{folder / NOTE} has format={saved!r}, and this version reads {FORMAT}; take another state")
    return note


def _same_adapters(folder: Path, saved: dict[str, Any] | None, current: dict[str, Any] | None) -> None:
    if saved != current:
        before, now = (", ".join(f"{k}={v}" for k, v in (of or {"lora_rank": 0}).items()) for of in (saved, current))
        raise ValueError(f"{folder} was saved with {before}, and this run has {now}; set what it was saved with")


def _same_model(folder: Path, kind: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise a ValueError if names or shapes of a state differ from the model's. The message has the first
    difference.
    """
    for name in [*saved, *(name for name in current if name not in saved)]:
        before = f"shape {list(saved[name]['shape'])}" if name in saved else "absent"
        now = f"shape {list(whole_shape(current[name]))}" if name in current else "absent"
        if before != now:
            raise ValueError(
                f"{folder} is the state of another model: the {kind} {name} is {before} in it and {now} in the engine; "
                "make the engine from the model that was trained there"
            )


def _open(path: Path, shapes: dict[str, list[int]]) -> TensorReader:
    try:
        reader = TensorReader(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, but {NOTE} beside it names it; take another state") from None
    except ValueError as error:
        raise ValueError(f"{path} is not whole ({error}); take another state") from error
    for name, shape in shapes.items():
        stored = list(reader.empty(name).shape) if name in reader else None
        if stored != shape:
            raise ValueError(f"{path} has {name} of shape {stored}, and {NOTE} beside it has {shape}; take another one")
    return reader

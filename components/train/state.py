"""All that training resumes from, on disk, whatever the engine, its stage and the number of ranks that wrote it.

<folder>/engine.json                   steps, the settings it was saved with, each parameter's shape and file
<folder>/rank_0.safetensors            whole float32 tensors `<parameter>/weight`, `/exp_avg`, `/exp_avg_sq`
<folder>/own_0.safetensors             what a rank has for itself: random state and buffers
<folder>/average.safetensors           `<parameter>/average`, float32, where an average of the weights is kept

`weight` is the master weight, the other two are AdamW's moments. Each parameter is written by one rank. Of a model with
adapters only what is trained is there.

A format of our own, because a run resumes on another engine, stage or number of ranks: DeepSpeed's checkpoints load at
the stage that wrote them, and torch.distributed.checkpoint does not know ZeRO's flat partitions. DeepSpeed's
`safe_get_full_*` functions are not used. With two parameter groups, ZeRO 1 and 2 link the moments of the
first alone; before the first step there are none to give; and their sum over the ranks turns -0.0 into 0.0.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from components.models.disk.blocks import Block, local_part, own_block
from components.models.disk.tensor_file import TensorFile, TensorReader
from components.process.heartbeat import beat
from components.train.collective_io import CollectiveIO
from components.train.config import TrainConfig
from components.train.weight_average import WeightAverage

NOTE = "engine.json"
AVERAGE = "average.safetensors"
FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
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
"""Of a setting that was another when the state was saved."""
PIECE = 16 * 2**20
"""So many numbers of a parameter are gathered, written or read at a time: 64 MB in float32."""


@dataclass(frozen=True)
class _Part:
    """What this rank has of one parameter, within the tensor that its AdamW steps."""

    flat: Tensor
    """Master weights. AdamW's state for this tensor has its moments, in the same order."""
    offset: int
    """Where the part begins in `flat`."""
    block: Block
    """Of the parameter; of ZeRO's, which are cut anywhere, in rows of one number."""

    def of(self, tensor: Tensor) -> Tensor:
        """[rows, columns] cut out of `flat` or of a moment, as a view."""
        numbers = local_part(tensor.detach()).view(-1).narrow(0, self.offset, self.block.numbers)
        return numbers.view(self.block.rows, self.block.columns)

    def fill(self, reader: TensorReader, name: str, into: Tensor) -> None:
        """Read the part of a tensor of a file, a piece at a time."""
        target, block = self.of(into), self.block
        for first, last in _pieces(block.rows, block.columns):
            piece = reader.block(name, replace(block, row=block.row + first, rows=last - first))
            target[first:last].copy_(piece.view(last - first, block.columns))


@dataclass(frozen=True)
class _Saved:
    """A folder that is being read."""

    note: dict[str, Any]
    readers: dict[str, TensorReader]
    """By file."""
    own: TensorReader
    """The one of what this rank has for itself; of rank 0's, when another number of ranks saved."""


@dataclass(frozen=True)
class EngineState:
    """The state of one engine, where it lies. All ranks make the same calls in the same order."""

    model: nn.Module
    adam: torch.optim.AdamW
    """It steps the parameters (zero_stage 0), or this rank's parts of them."""
    zero: Any
    """DeepSpeed's optimizer around it, which steps all parameters together; None with zero_stage 0, and without it."""
    config: TrainConfig
    device: torch.device
    """Where collectives are computed."""
    average: WeightAverage | None = None
    """Of the weights, on rank 0; all ranks have one or none has."""
    adapters: dict[str, Any] | None = None
    """The options of a model's adapters. The weights beneath them are not saved."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is saved and averaged: all, or with adapters what is trained."""
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad or self.adapters is None}

    def save(self, folder: Path, step_count: int) -> None:
        """Write the folder. The note comes last: a folder that has one is whole."""
        parameters, beneath = self.parameters, self._sum_beneath()
        writers = self._writers(parameters)
        io = CollectiveIO(f"write {folder}")
        io.do(partial(self._begin, folder))
        file = io.do(partial(self._create, folder, parameters, writers))
        for name, writer in writers.items():
            for key in self.keys_of(parameters[name]):
                # After an error too, since the other ranks gather.
                for start, piece in self.pieces(parameters[name], key, writer):
                    if writer == self.rank and file is not None:
                        io.do(partial(file.write_part, f"{name}/{key}", piece, start))
        if file is not None:
            file.close()
        if self.rank == 0 and self.average is not None:
            averages = {f"{name}/average": tensor for name, tensor in self.average.tensors.items()}
            io.do(partial(save_file, averages, folder / AVERAGE))
        io.end()
        if self.rank == 0:
            note = self._note(parameters, writers) | {"step_count": step_count, "beneath": beneath}
            io.do(lambda: (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8"))
        io.end()

    def load(self, folder: Path) -> tuple[int, list[str]]:
        """Take everything from the folder, once all ranks have found it whole; before that nothing is changed.

        Returns:
            The number of optimizer steps; and what is not exact, a sentence each.
        """
        with ExitStack() as stack:
            io = CollectiveIO(f"read {folder}")
            saved = io.do(lambda: self._open(folder, stack))
            io.end()
            assert saved is not None
            if saved.note["beneath"] != self._sum_beneath():
                raise ValueError(
                    f"the adapters in {folder} were trained on other weights than those beneath them here; make the "
                    "engine from the model that training started from"
                )
            self._fill(saved)
        self._refresh()
        if self.average is not None and saved.note["average"] is None:
            self.average.restart(self.master_weights())
        return saved.note["step_count"], self._remarks(saved.note)

    def master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole float32 weights that AdamW steps, by name, on rank 0's CPU; tied ones once, under their first name.

        Every rank must exhaust the iterator, since gathering is collective; ranks other than 0 get no items.
        """
        for name, parameter in self.parameters.items():
            pieces = [piece.to("cpu", copy=True) for _, piece in self.pieces(parameter, "weight", 0) if self.rank == 0]
            if pieces:
                yield name, torch.cat(pieces).view(whole_shape(parameter))

    def _sum_beneath(self) -> int | None:
        """A number that is another for other weights beneath the adapters, whatever the engine, its precision and the
        ranks: the sum of their bits in bfloat16. None without adapters.
        """
        if self.adapters is None:
            return None
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for parameter in self.model.parameters():
            part = None if parameter.requires_grad else self._part(parameter)
            # What is not partitioned, every rank has whole.
            if part is not None and (self.rank == 0 or hasattr(parameter, "ds_id") or _is_dtensor(parameter)):
                bits = part.of(part.flat).to(self.device, torch.bfloat16).view(torch.int16)
                total += bits.sum(dtype=torch.int64)
        dist.all_reduce(total)
        return int(total)

    def _part(self, parameter: Any) -> _Part | None:
        """None where other ranks have all of it."""
        if hasattr(parameter, "ds_id"):
            if parameter.requires_grad:
                group, offset, count = self.zero.grad_position[self.zero.get_param_id(parameter)]
                flat = self.zero.fp32_partitioned_groups_flat[group]
            else:
                flat, offset, count = parameter.ds_tensor, 0, parameter.ds_tensor.numel()
            # The last part is filled up to the size of the others, and may be nothing but filling.
            start = min(self.rank * count, parameter.ds_numel)
            return _Part(flat, offset, Block(start, min(count, parameter.ds_numel - start)))
        if not hasattr(parameter, "_hp_mapping"):
            return _Part(parameter, 0, own_block(parameter).by_numbers)
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        flat = self.adam.param_groups[mapping.param_group_index]["params"][0]
        master, own = mapping.hp_fragment_address, mapping.lp_fragment_address
        return _Part(flat, master.start, Block(own.start, own.numel))

    def _adam_step(self, parameter: nn.Parameter) -> int | None:
        """AdamW's own number of the parameter's last step; None where it has no moments."""
        if not parameter.requires_grad:
            return None
        if not _is_zeros(parameter):
            state = self.adam.state.get(parameter)
            return int(state["step"]) if state else None
        # All are stepped together, and this rank may have no part of this one.
        return max((int(state["step"]) for state in self.adam.state.values() if state), default=None)

    def keys_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """What is saved of a parameter."""
        return ("weight",) if self._adam_step(parameter) is None else ("weight", *MOMENTS)

    def pieces(self, parameter: nn.Parameter, key: str, writer: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the float32 master weight or a moment of one parameter in flat pieces, each with its start.

        Every rank must exhaust the iterator, and the pieces are right on `writer` alone.
        """
        part = self._part(parameter)
        block = Block(0, 0) if part is None else part.block
        own = torch.empty(0, 1)
        if part is not None:
            own = part.of(part.flat if key == "weight" else self.adam.state[part.flat][key])
        is_on_writer = self.world_size == 1 or not (_is_zeros(parameter) or _is_dtensor(parameter))
        for first, last in _pieces(whole_shape(parameter).numel() // block.width, block.width):
            beat()
            begin = max(block.row, first)
            end = max(begin, min(block.row + block.rows, last))
            numbers = own[begin - block.row : end - block.row].float()
            if not is_on_writer:
                place = replace(block, row=begin - first, rows=end - begin)
                numbers = self._collect(numbers, place, last - first, writer)
            yield first * block.width, numbers.flatten()

    def _collect(self, numbers: Tensor, place: Block, rows: int, writer: int) -> Tensor:
        """Return a piece of so many rows on `writer`, to which each rank contributes its numbers at a place."""
        # Added as integers, all but one of which are 0, the parts arrive with every bit.
        bits = torch.zeros(rows, place.width, dtype=torch.int32, device=self.device)
        if place.is_first and place.rows:
            place.of(bits).copy_(numbers.view(torch.int32))
        dist.reduce(bits, dst=writer)
        return bits.view(torch.float32)

    def _writers(self, parameters: dict[str, nn.Parameter]) -> dict[str, int]:
        """Which rank writes which parameter: equal shares at any time, so that all write together."""
        writers: dict[str, int] = {}
        written = [0] * self.world_size
        for name, parameter in parameters.items():
            writers[name] = written.index(min(written))
            written[writers[name]] += whole_shape(parameter).numel() * len(self.keys_of(parameter))
        return writers

    def _create(self, folder: Path, parameters: dict[str, nn.Parameter], writers: dict[str, int]) -> TensorFile:
        """Begin this rank's file."""
        tensors = {
            f"{name}/{key}": torch.empty(whole_shape(parameter), device="meta")
            for name, parameter in parameters.items()
            for key in self.keys_of(parameter)
            if writers[name] == self.rank
        }
        return TensorFile(folder / f"rank_{self.rank}.safetensors", tensors)

    def _begin(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            (folder / NOTE).unlink(missing_ok=True)
        own = {f"{name}/buffer": buffer.to("cpu", copy=True) for name, buffer in self.buffers.items()}
        own["cpu/random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            own["cuda/random"] = torch.cuda.get_rng_state()
        save_file(own, folder / f"own_{self.rank}.safetensors")

    def _note(self, parameters: dict[str, nn.Parameter], writers: dict[str, int]) -> dict[str, Any]:
        entries = {
            name: {
                "shape": list(whole_shape(parameter)),
                "adam_step": self._adam_step(parameter),
                "file": f"rank_{writers[name]}.safetensors",
            }
            for name, parameter in parameters.items()
        }
        steps = [entry["adam_step"] for entry in entries.values() if entry["adam_step"] is not None]
        return {
            "format": FORMAT,
            "world_size": self.world_size,
            **self._settings(),
            "adam_step": max(steps, default=None),
            "average": AVERAGE if self.average is not None else None,
            "adapters": self.adapters,
            "parameters": entries,
            "buffers": {name: {"shape": list(buffer.shape)} for name, buffer in self.buffers.items()},
        }

    def _settings(self) -> dict[str, Any]:
        names = ("engine", "precision", "adam_offload", "context", "tensor", "expert")
        own = {name: getattr(self.config, name) for name in names}
        return {"zero_stage": self.config.stage, **own, "device": self.device.type}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Those that are saved with the model."""
        persistent = self.model.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in persistent}

    def _open(self, folder: Path, stack: ExitStack) -> _Saved:
        """Find all that is to be read, and refuse what is not whole or of another model."""
        note = _read_note(folder)
        _same_adapters(folder, note["adapters"], self.adapters)
        _same_model(folder, "parameter", note["parameters"], self.parameters)
        _same_model(folder, "buffer", note["buffers"], self.buffers)
        own = f"own_{self.rank if note['world_size'] == self.world_size else 0}.safetensors"
        shapes: dict[str, dict[str, list[int]]] = defaultdict(dict)
        """Of the tensors that each file has to have."""
        for name, entry in note["parameters"].items():
            for key in ("weight",) if entry["adam_step"] is None else ("weight", *MOMENTS):
                shapes[entry["file"]][f"{name}/{key}"] = entry["shape"]
            if note["average"]:
                shapes[note["average"]][f"{name}/average"] = entry["shape"]
        shapes[own] = {f"{name}/buffer": entry["shape"] for name, entry in note["buffers"].items()}
        readers = {file: stack.enter_context(_open(folder / file, wanted)) for file, wanted in sorted(shapes.items())}
        return _Saved(note, readers, readers[own])

    @torch.no_grad()
    def _fill(self, saved: _Saved) -> None:
        for name, parameter in self.parameters.items():
            part = self._part(parameter)
            if part is not None:
                self._fill_part(name, parameter, part, saved)
        for name, buffer in self.buffers.items():
            buffer.copy_(saved.own.whole(f"{name}/buffer"))
        average = saved.note["average"]
        if self.average is not None and average:
            reader = saved.readers[average]
            self.average.restart((name, reader.whole(f"{name}/average")) for name in self.average.tensors)
        if saved.note["world_size"] == self.world_size:
            torch.set_rng_state(saved.own.whole("cpu/random"))
            if self.device.type == saved.note["device"] == "cuda":
                torch.cuda.set_rng_state(saved.own.whole("cuda/random"))

    def _fill_part(self, name: str, parameter: nn.Parameter, part: _Part, saved: _Saved) -> None:
        beat()
        entry = saved.note["parameters"][name]
        reader = saved.readers[entry["file"]]
        part.fill(reader, f"{name}/weight", into=part.flat)
        # ZeRO steps all parameters together, also those that had no gradient, and so no moments, without it.
        step = saved.note["adam_step"] if _is_zeros(parameter) else entry["adam_step"]
        if step is None or not parameter.requires_grad:
            self.adam.state.pop(part.flat, None)
            return
        state = self.adam.state[part.flat]
        state["step"] = torch.tensor(float(step), device=part.flat.device)
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(part.flat)
            if entry["adam_step"] is None:
                part.of(state[key]).zero_()
            else:
                part.fill(reader, f"{name}/{key}", into=state[key])

    def _remarks(self, note: dict[str, Any]) -> list[str]:
        remarks = []
        if note["world_size"] != self.world_size:
            remarks.append(
                f"saved by {note['world_size']} rank(s), loaded by {self.world_size}: gradients are added in another "
                "order, and dropout starts anew from its seed"
            )
        for name, value in self._settings().items():
            # Older states know no axes.
            if (saved := note.get(name, 1)) != value:
                remarks.append(f"saved with {name}={saved}, loaded with {name}={value}: {CONSEQUENCES[name]}")
        if self.average is not None and note["average"] is None:
            remarks.append("saved without an average of the weights: the average starts from the weights loaded")
        if self.average is None and note["average"] is not None:
            remarks.append("saved with an average of the weights, loaded without one: the average is left out")
        steps = {entry["adam_step"] for entry in note["parameters"].values() if entry["adam_step"] is not None}
        if len(steps) > 1 and self.zero is not None:
            remarks.append(
                f"AdamW had stepped some parameters {min(steps)} times and others {max(steps)}, and ZeRO counts once: "
                f"all resume from {max(steps)}"
            )
        return remarks

    def _refresh(self) -> None:
        """Give the master weights to the passes, as DeepSpeed does at the end of a step."""
        if self.zero is None:
            return
        if self.config.stage == 3:
            self.zero._partition_all_parameters()
            for group in range(len(self.zero.fp16_groups)):
                self.zero._reassign_or_swap_out_partitioned_parameters(group)
            self.zero._post_step(set())
        else:
            self.zero.update_lp_params()


def _is_zeros(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed's ZeRO has partitioned it, or what AdamW keeps of it."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def _pieces(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Rows of so many numbers, as many at a time as there are in `PIECE`."""
    step = max(1, PIECE // width)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


def whole_shape(tensor: Any) -> torch.Size:
    """Of the whole parameter, also where a rank has a part of it."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def _read_note(folder: Path) -> dict[str, Any]:
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} has no {NOTE}: it is no state of an engine, or its saving was cut short; take another one"
        ) from None
    except ValueError as error:
        raise ValueError(f"{folder / NOTE} is not what save_state writes ({error}); take another state") from error
    found = note.get("format")
    if found != FORMAT:
        raise ValueError(f"{folder / NOTE} has format={found!r}, and this version reads {FORMAT}; take another state")
    return note


def _same_adapters(folder: Path, saved: dict[str, Any] | None, here: dict[str, Any] | None) -> None:
    if saved != here:
        there, own = (", ".join(f"{k}={v}" for k, v in (of or {"lora_rank": 0}).items()) for of in (saved, here))
        raise ValueError(f"{folder} was saved with {there}, and this run has {own}; set what it was saved with")


def _same_model(folder: Path, kind: str, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse a state whose names or shapes differ from the model's, naming the first that does."""
    for name in [*saved, *(name for name in here if name not in saved)]:
        there = f"shape {list(saved[name]['shape'])}" if name in saved else "absent"
        own = f"shape {list(whole_shape(here[name]))}" if name in here else "absent"
        if there != own:
            raise ValueError(
                f"{folder} is the state of another model: the {kind} {name} is {there} in it and {own} in the engine; "
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
        found = list(reader.empty(name).shape) if name in reader else None
        if found != shape:
            raise ValueError(f"{path} has {name} of shape {found}, and {NOTE} beside it has {shape}; take another one")
    return reader

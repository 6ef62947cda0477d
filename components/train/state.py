"""Training state on disk, independent of the engine, its ZeRO stage and the number of ranks that wrote it.

<folder>/engine.json                   steps, the settings it was saved with, each parameter's shape and file
<folder>/rank_0.safetensors            whole float32 tensors `<parameter>/weight`, `/exp_avg`, `/exp_avg_sq`
<folder>/own_0.safetensors             state of a single rank: random state and buffers
<folder>/average.safetensors           `<parameter>/average`, float32, if an average of the weights is kept

`weight` is the master weight, the other two are AdamW's moments. Each parameter is written by one rank. Of a model with
adapters, only the trained parameters are saved.

The format is our own, because a run may resume with another engine, stage or number of ranks. DeepSpeed's checkpoints
load only at the stage that wrote them, and torch.distributed.checkpoint does not support ZeRO's flat partitions.
DeepSpeed's `safe_get_full_*` functions are not used for three reasons. With two parameter groups, ZeRO 1 and 2 link the
moments of the first group only. Before the first step they return no moments. Their sum over the ranks turns -0.0 into
0.0.
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
from components.train.partitioned_model import PartitionedModel, whole_shape

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
"""Consequence, by setting, of loading a state that was saved with another value."""
PIECE = 16 * 2**20
"""Number of elements of a parameter that are gathered, written or read at a time: 64 MB in float32."""


def save_state(engine: PartitionedModel, folder: str | Path) -> None:
    """Write the complete training state. All ranks must call this, and each writes a share.

    The state consists of the float32 master weights, AdamW's moments and step numbers, `step_count`, the model's
    persistent buffers, each rank's random state, and the average of the weights if there is one. With adapters,
    only the trained parameters are written. Call it between two calls of `train_step`, and not after an error in
    one.

    Args:
        engine: training engine.
        folder: path to a folder on a file system that all ranks share. It is created if it is missing. An older
            state in it is replaced.

    Raises:
        OSError: a rank cannot write. It is raised on all ranks, and the engine can still be used.
    """
    engine.check_awake()
    EngineState(engine).save(Path(folder), engine.step_count)


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
    engine.step_count, inexact = EngineState(engine).load(Path(folder))
    return inexact


@dataclass(frozen=True)
class _Part:
    """This rank's shard of one parameter, within the tensor that its AdamW updates."""

    flat: Tensor
    """Master weights. AdamW's state of this tensor contains the moments in the same order."""
    offset: int
    """Offset of the shard in `flat`, in elements."""
    block: Block
    """Position of the shard in the parameter. For ZeRO, whose cuts are not at rows, the rows have one element each."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the shard of `flat` or of a moment, as a view of shape [rows, columns]."""
        numbers = local_part(tensor.detach()).view(-1).narrow(0, self.offset, self.block.numbers)
        return numbers.view(self.block.rows, self.block.columns)

    def fill(self, reader: TensorReader, name: str, into: Tensor) -> None:
        """Read the shard of a tensor from a file, one piece at a time.

        Args:
            reader: reader of the file.
            name: name of the tensor in the file.
            into: `flat`, or a moment of the same shape.
        """
        target, block = self.of(into), self.block
        for first, last in _pieces(block.rows, block.columns):
            piece = reader.block(name, replace(block, row=block.row + first, rows=last - first))
            target[first:last].copy_(piece.view(last - first, block.columns))


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
class EngineState:
    """Training state of one engine, in place. All ranks must make the same calls in the same order."""

    engine: PartitionedModel

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def adapters(self) -> dict[str, Any] | None:
        """Settings of the model's adapters, or None. The weights beneath adapters are not saved."""
        return None if self.engine.adapters is None else self.engine.adapters.note

    def save(self, folder: Path, step_count: int) -> None:
        """Write the folder. engine.json is written last, so a folder that contains it is complete."""
        parameters, beneath = self.engine.parameters, self._sum_beneath()
        writers = self._writers(parameters)
        io = CollectiveIO(f"write {folder}")
        io.do(partial(self._begin, folder))
        file = io.do(partial(self._create, folder, parameters, writers))
        for name, writer in writers.items():
            for key in self.keys_of(parameters[name]):
                # The loop continues after an error too, because gathering is collective and the other ranks would wait.
                for start, piece in self.pieces(parameters[name], key, writer):
                    if writer == self.rank and file is not None:
                        io.do(partial(file.write_part, f"{name}/{key}", piece, start))
        if file is not None:
            file.close()
        if self.rank == 0 and self.engine.average is not None:
            averages = {f"{name}/average": tensor for name, tensor in self.engine.average.tensors.items()}
            io.do(partial(save_file, averages, folder / AVERAGE))
        # All ranks must have written their files before the note declares the folder complete.
        io.end()
        if self.rank == 0:
            note = self._note(parameters, writers) | {"step_count": step_count, "beneath": beneath}
            io.do(lambda: (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8"))
        io.end()

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
        if self.engine.average is not None and saved.note["average"] is None:
            self.engine.average.restart(self.master_weights())
        return saved.note["step_count"], self._remarks(saved.note)

    def master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole float32 master weights by name, on the CPU of rank 0. Tied weights are yielded once, under
        their first name.

        Every rank must exhaust the iterator, because gathering is collective. Ranks other than 0 get no items.
        """
        for name, parameter in self.engine.parameters.items():
            pieces = [piece.to("cpu", copy=True) for _, piece in self.pieces(parameter, "weight", 0) if self.rank == 0]
            if pieces:
                yield name, torch.cat(pieces).view(whole_shape(parameter))

    def _sum_beneath(self) -> int | None:
        """Return a checksum of the weights beneath the adapters: the sum of their bits in bfloat16. None without
        adapters.

        It does not depend on the engine, its precision or the number of ranks.
        """
        if self.adapters is None:
            return None
        total = torch.zeros((), dtype=torch.int64, device=self.engine.device)
        for parameter in self.engine.model.parameters():
            part = None if parameter.requires_grad else self._part(parameter)
            # Every rank has the parameters that are not sharded, so only rank 0 counts them.
            if part is not None and (self.rank == 0 or hasattr(parameter, "ds_id") or _is_dtensor(parameter)):
                bits = part.of(part.flat).to(self.engine.device, torch.bfloat16).view(torch.int16)
                total += bits.sum(dtype=torch.int64)
        dist.all_reduce(total)
        return int(total)

    def _part(self, parameter: Any) -> _Part | None:
        """Return this rank's shard of a parameter, or None if other ranks have all of it."""
        if hasattr(parameter, "ds_id"):
            if parameter.requires_grad:
                group, offset, count = self.engine.zero.grad_position[self.engine.zero.get_param_id(parameter)]
                flat = self.engine.zero.fp32_partitioned_groups_flat[group]
            else:
                flat, offset, count = parameter.ds_tensor, 0, parameter.ds_tensor.numel()
            # The shards of the last ranks are padded to the size of the others, and may consist of padding only.
            start = min(self.rank * count, parameter.ds_numel)
            return _Part(flat, offset, Block(start, min(count, parameter.ds_numel - start)))
        if not hasattr(parameter, "_hp_mapping"):
            return _Part(parameter, 0, own_block(parameter).by_numbers)
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        flat = self.engine.adam.param_groups[mapping.param_group_index]["params"][0]
        master, working = mapping.hp_fragment_address, mapping.lp_fragment_address
        return _Part(flat, master.start, Block(working.start, working.numel))

    def _adam_step(self, parameter: nn.Parameter) -> int | None:
        """Return AdamW's step number of a parameter, or None if it has no moments."""
        if not parameter.requires_grad:
            return None
        if not _is_zeros(parameter):
            state = self.engine.adam.state.get(parameter)
            return int(state["step"]) if state else None
        # ZeRO steps all parameters together. This rank may have no shard of this one, so any step number is taken.
        return max((int(state["step"]) for state in self.engine.adam.state.values() if state), default=None)

    def keys_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the keys of the tensors that are saved for a parameter."""
        return ("weight",) if self._adam_step(parameter) is None else ("weight", *MOMENTS)

    def pieces(self, parameter: nn.Parameter, key: str, writer: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the float32 master weight or a moment of one parameter in flat pieces, each with its offset in
        elements.

        Every rank must exhaust the iterator. The pieces are valid on the rank `writer` only.
        """
        part = self._part(parameter)
        block = Block(0, 0) if part is None else part.block
        shard = torch.empty(0, 1)
        if part is not None:
            shard = part.of(part.flat if key == "weight" else self.engine.adam.state[part.flat][key])
        is_on_writer = self.world_size == 1 or not (_is_zeros(parameter) or _is_dtensor(parameter))
        for first, last in _pieces(whole_shape(parameter).numel() // block.width, block.width):
            beat()
            begin = max(block.row, first)
            end = max(begin, min(block.row + block.rows, last))
            numbers = shard[begin - block.row : end - block.row].float()
            if not is_on_writer:
                place = replace(block, row=begin - first, rows=end - begin)
                numbers = self._collect(numbers, place, last - first, writer)
            yield first * block.width, numbers.flatten()

    def _collect(self, numbers: Tensor, place: Block, rows: int, writer: int) -> Tensor:
        """Gather a piece of a parameter on the rank `writer`.

        Args:
            numbers: elements of this rank.
            place: their position in the piece.
            rows: number of rows of the piece.
            writer: rank that receives the piece.
        """
        # The bits are summed as integers. All ranks but one contribute 0, so every bit arrives unchanged; a float sum
        # would turn -0.0 into 0.0.
        bits = torch.zeros(rows, place.width, dtype=torch.int32, device=self.engine.device)
        if place.is_first and place.rows:
            place.of(bits).copy_(numbers.view(torch.int32))
        dist.reduce(bits, dst=writer)
        return bits.view(torch.float32)

    def _writers(self, parameters: dict[str, nn.Parameter]) -> dict[str, int]:
        """Return the rank that writes each parameter. The ranks take turns by size, so that all of them write at the
        same time.
        """
        writers: dict[str, int] = {}
        written = [0] * self.world_size
        for name, parameter in parameters.items():
            writers[name] = written.index(min(written))
            written[writers[name]] += whole_shape(parameter).numel() * len(self.keys_of(parameter))
        return writers

    def _create(self, folder: Path, parameters: dict[str, nn.Parameter], writers: dict[str, int]) -> TensorFile:
        """Create this rank's file."""
        tensors = {
            f"{name}/{key}": torch.empty(whole_shape(parameter), device="meta")
            for name, parameter in parameters.items()
            for key in self.keys_of(parameter)
            if writers[name] == self.rank
        }
        return TensorFile(folder / f"rank_{self.rank}.safetensors", tensors)

    def _begin(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The note of an older state must not remain while its files are overwritten: it would declare a mixture
        # complete.
        if self.rank == 0:
            (folder / NOTE).unlink(missing_ok=True)
        tensors = {f"{name}/buffer": buffer.to("cpu", copy=True) for name, buffer in self.engine.buffers.items()}
        tensors["cpu/random"] = torch.get_rng_state()
        if self.engine.device.type == "cuda":
            tensors["cuda/random"] = torch.cuda.get_rng_state()
        save_file(tensors, folder / f"own_{self.rank}.safetensors")

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
            "average": AVERAGE if self.engine.average is not None else None,
            "adapters": self.adapters,
            "parameters": entries,
            "buffers": {name: {"shape": list(buffer.shape)} for name, buffer in self.engine.buffers.items()},
        }

    def _settings(self) -> dict[str, Any]:
        names = ("engine", "precision", "adam_offload", "context", "tensor", "expert")
        settings = {name: getattr(self.engine.config, name) for name in names}
        return {"zero_stage": self.engine.config.stage, **settings, "device": self.engine.device.type}

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
            buffer.copy_(saved.rank_reader.whole(f"{name}/buffer"))
        average = saved.note["average"]
        if self.engine.average is not None and average:
            reader = saved.readers[average]
            self.engine.average.restart((name, reader.whole(f"{name}/average")) for name in self.engine.average.tensors)
        # With another number of ranks there is no random state for each rank, and dropout restarts from the seed.
        if saved.note["world_size"] == self.world_size:
            torch.set_rng_state(saved.rank_reader.whole("cpu/random"))
            if self.engine.device.type == saved.note["device"] == "cuda":
                torch.cuda.set_rng_state(saved.rank_reader.whole("cuda/random"))

    def _fill_part(self, name: str, parameter: nn.Parameter, part: _Part, saved: _Saved) -> None:
        beat()
        entry = saved.note["parameters"][name]
        reader = saved.readers[entry["file"]]
        part.fill(reader, f"{name}/weight", into=part.flat)
        # ZeRO has one step number for all parameters. A parameter without a gradient has no moments in a state that was
        # saved without ZeRO, and then takes the step number of the others.
        step = saved.note["adam_step"] if _is_zeros(parameter) else entry["adam_step"]
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


def _is_zeros(parameter: nn.Parameter) -> bool:
    """True if DeepSpeed's ZeRO has sharded the parameter or its optimizer state."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def _pieces(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last row (exclusive) of each piece of at most `PIECE` elements, but at least one row.

    Args:
        rows: number of rows.
        width: number of elements of a row.
    """
    step = max(1, PIECE // width)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


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

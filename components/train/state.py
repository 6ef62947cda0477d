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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from components.models.disk.blocks import Block, local_part, own_block
from components.models.disk.tensor_file import TensorFile
from components.process.heartbeat import beat
from components.train.collective_io import CollectiveIO
from components.train.partitioned_model import PartitionedModel, whole_shape

NOTE = "engine.json"
AVERAGE = "average.safetensors"
FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
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


@dataclass(frozen=True)
class Part:
    """This rank's shard of one parameter, within the tensor that its AdamW updates."""

    flat: Tensor
    """Master weights. AdamW's state of this tensor contains the moments in the same order."""
    offset: int
    """Offset of the shard in `flat`, in elements."""
    block: Block
    """Position of the shard in the parameter. For ZeRO, whose cuts are not at rows, the rows have one element each."""

    def view(self, tensor: Tensor) -> Tensor:
        """Return the shard of `flat` or of a moment, as a view of shape [rows, columns]."""
        numbers = local_part(tensor.detach()).view(-1).narrow(0, self.offset, self.block.numbers)
        return numbers.view(self.block.rows, self.block.columns)


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
        io.run(partial(self._begin, folder))
        file = io.run(partial(self._create, folder, parameters, writers))
        for name, writer in writers.items():
            for key in self.keys_of(parameters[name]):
                # The loop continues after an error too, because gathering is collective and the other ranks would wait.
                for start, piece in self.pieces(parameters[name], key, writer):
                    if writer == self.rank and file is not None:
                        io.run(partial(file.write_part, f"{name}/{key}", piece, start))
        if file is not None:
            file.close()
        if self.rank == 0 and self.engine.average is not None:
            averages = {f"{name}/average": tensor for name, tensor in self.engine.average.tensors.items()}
            io.run(partial(save_file, averages, folder / AVERAGE))
        # All ranks must have written their files before the note declares the folder complete.
        io.end()
        if self.rank == 0:
            note = self._note(parameters, writers) | {"step_count": step_count, "beneath": beneath}
            io.run(lambda: (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8"))
        io.end()

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
                bits = part.view(part.flat).to(self.engine.device, torch.bfloat16).view(torch.int16)
                total += bits.sum(dtype=torch.int64)
        dist.all_reduce(total)
        return int(total)

    def _part(self, parameter: Any) -> Part | None:
        """Return this rank's shard of a parameter, or None if other ranks have all of it."""
        if hasattr(parameter, "ds_id"):
            if parameter.requires_grad:
                group, offset, count = self.engine.zero.grad_position[self.engine.zero.get_param_id(parameter)]
                flat = self.engine.zero.fp32_partitioned_groups_flat[group]
            else:
                flat, offset, count = parameter.ds_tensor, 0, parameter.ds_tensor.numel()
            # The shards of the last ranks are padded to the size of the others, and may consist of padding only.
            start = min(self.rank * count, parameter.ds_numel)
            return Part(flat, offset, Block(start, min(count, parameter.ds_numel - start)))
        if not hasattr(parameter, "_hp_mapping"):
            return Part(parameter, 0, own_block(parameter).by_numbers)
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        flat = self.engine.adam.param_groups[mapping.param_group_index]["params"][0]
        master, working = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Part(flat, master.start, Block(working.start, working.numel))

    def _adam_step(self, parameter: nn.Parameter) -> int | None:
        """Return AdamW's step number of a parameter, or None if it has no moments."""
        if not parameter.requires_grad:
            return None
        if not is_zeros(parameter):
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
            shard = part.view(part.flat if key == "weight" else self.engine.adam.state[part.flat][key])
        is_on_writer = self.world_size == 1 or not (is_zeros(parameter) or _is_dtensor(parameter))
        for first, last in row_pieces(whole_shape(parameter).numel() // block.width, block.width):
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
            place.view(bits).copy_(numbers.view(torch.int32))
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


def is_zeros(parameter: nn.Parameter) -> bool:
    """True if DeepSpeed's ZeRO has sharded the parameter or its optimizer state."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def row_pieces(rows: int, width: int) -> Iterator[tuple[int, int]]:
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

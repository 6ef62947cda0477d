"""Reading of a model's weights from its safetensors files by name and by rows: a process reads only the rows it keeps.

An empty model (`load_policy(..., empty=True)`) has its parameters on the meta device: names and shapes without memory.
The engine decides which rank keeps which rows, and `fill` then reads them.

The files may have older names than the model, and may store a parameter as many tensors, such as the experts of a
layer. The conversion rules of transformers are applied to one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from components.models.disk.blocks import Block, local_part, own_block
from components.models.disk.tensor_file import TensorReader
from components.models.disk.tensor_header import SINGLE, index_of
from components.process.heartbeat import beat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READ_BYTES = 64 * 2**20
"""Maximum number of bytes that are read at a time into a parameter, as float32. A single row may be larger."""


class ReadWhole(Exception):
    """Raised if the weights of a model cannot be read in parts. The message contains the reason."""


@dataclass(frozen=True)
class _Source:
    """Tensors in the files from which one tensor of the model is read."""

    keys: list[tuple[str, str]]
    """(pattern of the converter, name in the files), in the order of the converter; a single pair without a
    converter."""
    converter: Any = None
    """Converter of transformers for `target`. None: the files contain the tensor unchanged."""
    target: str = ""
    stacked: int = 0
    """Number of tensors per pattern, if each of them is a row of the parameter and can be converted separately. 0: the
    tensors can only be converted together."""

    def of_rows(self, rows: range | None) -> list[tuple[str, str]]:
        if rows is None or not self.stacked:
            return self.keys
        by_pattern: dict[str, list[str]] = {}
        for pattern, key in self.keys:
            by_pattern.setdefault(pattern, []).append(key)
        return [(pattern, keys[row]) for pattern, keys in by_pattern.items() for row in rows]


class WeightFiles:
    """Mapping from the parameters and buffers of a model to tensors in safetensors files. No tensor is kept in
    memory.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        """
        Args:
            model: model with its parameters on the meta device.
            folder: folder that `save_pretrained` wrote, or that was downloaded from the hub.

        Raises:
            ReadWhole: loading the model needs more than these files.
        """
        self._folder = folder
        self._file_of = _files(folder)
        self._readers: dict[str, TensorReader] = {}
        self._stack = ExitStack()
        # The model is in a dict. As an attribute, a module could take it for a submodule of its own.
        self._context = {"model": model, "config": model.config}
        with self:
            self._sources = self._find(model)
            self._join_tied(model)

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._readers.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    @torch.no_grad()
    def read(self, name: str, into: Tensor, block: Block) -> None:
        """Copy a block of a tensor of the model to `into`, converted to its dtype and device."""
        source = self._sources[name]
        if not into.ndim:
            into.copy_(self._reader(source.keys[0][1]).read_tensor(source.keys[0][1]))
        elif source.converter is not None and not source.stacked:
            rows = self._converted(source)[name][block.row : block.row + block.rows]
            into.copy_(block.columns_of(rows).view(into.shape))
        else:
            for first, last in _chunks(into):
                rows = self._rows(name, source, replace(block, row=block.row + first, rows=last - first))
                into[first:last].copy_(rows.view(into[first:last].shape))

    def _rows(self, name: str, source: _Source, block: Block) -> Tensor:
        if source.converter is None:
            key = source.keys[0][1]
            return self._reader(key).block(key, block)
        rows = range(block.row, block.row + block.rows)
        return block.columns_of(self._converted(source, rows)[name])

    def _converted(self, source: _Source, rows: range | None = None, on_meta: bool = False) -> dict[str, Tensor]:
        """Return whole parameters, or some of their rows, that transformers converts from the tensors in the files."""
        # A converter keeps the tensors that it has received, so each conversion needs a fresh one.
        converter = deepcopy(source.converter)
        for pattern, key in source.of_rows(rows):
            reader = self._reader(key)
            read = reader.read_tensor
            if on_meta:
                read = reader.empty
            converter.add_tensor(source.target, key, pattern, read(key))
        made = converter.convert(source.target, **self._context)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _reader(self, key: str) -> TensorReader:
        file = self._file_of[key]
        # Kept open: a file holds hundreds of tensors, and opening it parses its header again.
        if file not in self._readers:
            try:
                self._readers[file] = self._stack.enter_context(TensorReader(self._folder / file))
            except ValueError as error:
                raise ReadWhole(f"{self._folder / file}: {error}") from error
        return self._readers[file]

    def _find(self, model: PreTrainedModel) -> dict[str, _Source]:
        """Return the source of each tensor of the model. Names are converted as transformers does when it loads."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

        state = model.state_dict(keep_vars=True)
        loaded: Any = model
        rules: Any = get_model_conversion_mapping(model)
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        sources: dict[str, _Source] = {}
        for key in sorted(self._file_of, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
            if name not in state:
                continue  # a head that this model has not, or a buffer of older versions
            converter = of_pattern.get(pattern or "")
            source = sources.setdefault(name, _Source([], converter, name))
            source.keys.append((pattern or key, key))
        # save_pretrained reverts these conversions, so that the written files have the names of the read ones.
        loaded._weight_conversions = [rule for rule in rules if rule.was_used()]
        return dict(self._checked(sources, state))

    def _checked(self, sources: dict[str, _Source], state: dict[str, Any]) -> Iterator[tuple[str, _Source]]:
        """Yield the sources by the names of the tensors that they give, whose shapes are checked against the
        model's.
        """
        for source in sources.values():
            if source.converter is None:
                made = {source.target: self._reader(source.keys[0][1]).empty(source.keys[0][1])}
            else:
                made = self._converted(source, on_meta=True)
            for name, tensor in made.items():
                if name not in state or tensor.shape != state[name].shape:
                    here = "absent"
                    if name in state:
                        here = str(list(state[name].shape))
                    raise ReadWhole(f"{name} has shape {list(tensor.shape)} in its files, and is {here} in the model")
                yield name, self._by_rows(source, name, tensor)

    def _by_rows(self, source: _Source, name: str, whole: Tensor) -> _Source:
        """Return the source with `stacked` set, if rows of the parameter can be converted from some of its tensors."""
        counts = {sum(other == pattern for other, _ in source.keys) for pattern, _ in source.keys}
        # One tensor per row and pattern, as for experts: then a rank reads only the tensors of its rows.
        if source.converter is None or not whole.ndim or counts != {len(whole)} or len(whole) < 2:
            return source
        stacked = _Source(source.keys, source.converter, source.target, len(whole))
        part = self._converted(stacked, range(1, 2), on_meta=True)[name]
        if part.shape != (1, *whole.shape[1:]):
            return source
        return stacked

    def _join_tied(self, model: PreTrainedModel) -> None:
        """Add the other names of tied parameters, because the files contain only one of the names."""
        names_of: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(parameter), []).append(name)
        for names in names_of.values():
            stored = [name for name in names if name in self._sources]
            if not stored:
                raise ReadWhole(f"{names[0]} is not in {self._folder}")
            if any(not self._are_equal(model, stored[0], other) for other in stored[1:]):
                raise ReadWhole(f"{' and '.join(stored)} are to be the same, and differ in {self._folder}")
            self._sources |= dict.fromkeys(names, self._sources[stored[0]])

    def _are_equal(self, model: PreTrainedModel, name: str, other: str) -> bool:
        whole = model.get_parameter(name)
        blocks = [replace(own_block(whole), row=first, rows=last - first) for first, last in _chunks(whole)]
        return all(
            torch.equal(*(self._rows(one, self._sources[one], block) for one in (name, other))) for block in blocks
        )


def fill(model: nn.Module, device: torch.device | str) -> None:
    """Read the weights of an empty model. Of sharded parameters, only the rows of this rank are read.

    Every parameter on the meta device is replaced by one on `device`. Other parameters, such as new adapters and heads,
    and buffers are unchanged, as is a model that is not empty.

    Args:
        model: policy or value model, with or without adapters, with or without `fully_shard`.
        device: device of the parameters.
    """
    for _ in filled(model, device):
        pass


def filled(model: nn.Module, device: torch.device | str, reads: bool = True) -> Iterator[nn.Parameter]:
    """Yield the parameters of a model in their order. Each one is filled as in `fill` when it is reached.

    Args:
        model: as for `fill`.
        device: as for `fill`.
        reads: read the weights. Otherwise the parameters are allocated and uninitialized.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    with ExitStack() as stack:
        files: dict[str, WeightFiles] = {}
        for path, module in model.named_modules():
            if isinstance(source := getattr(module, "weight_files", None), WeightFiles):
                files[path and f"{path}."] = stack.enter_context(source)
            for name, parameter in module.named_parameters(recurse=False):
                places.setdefault(parameter, []).append((module, name))
        for name, parameter in list(model.named_parameters()):
            if not parameter.is_meta:
                yield parameter
                continue
            made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            if reads:
                prefix = next(prefix for prefix in files if name.startswith(prefix))
                # peft moves a layer with an adapter to `base_layer` of the layer that replaces it.
                stored = name.removeprefix(prefix).replace(".base_layer.", ".")
                files[prefix].read(stored, local_part(made.detach()), own_block(made))
            for module, own_name in places[parameter]:
                setattr(module, own_name, made)
            beat()
            yield made


def _chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the first and the last row (exclusive) of each piece of a tensor that is read at a time."""
    rows = max(1, READ_BYTES * len(tensor) // max(1, 4 * tensor.numel()))
    for first in range(0, len(tensor), rows):
        yield first, min(first + rows, len(tensor))


def _files(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor in the folder."""
    index = index_of(folder)
    if index is not None:
        return index
    if not (folder / SINGLE).is_file():
        raise ReadWhole(f"{folder} has no safetensors files")
    try:
        with TensorReader(folder / SINGLE) as reader:
            return dict.fromkeys(reader, SINGLE)
    except ValueError as error:
        raise ReadWhole(f"{folder / SINGLE}: {error}") from error

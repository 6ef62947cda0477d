"""Batch: sequences of different lengths, laid end to end without padding.

Shape suffixes: B sequences; N all tokens of a batch end to end; T tokens of the longest sequence (padded tensors only).

Per-token columns have the length of `tokens`. Entry t belongs to token t: its log-probability given the tokens before
it, the value of the state before it, its advantage. No column is shifted. `action_mask` is True where the policy
produced the token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, overload

import numpy as np
import torch
from torch import Tensor

from components.batch import files as batch_io
from components.batch import ragged
from components.batch.ragged import Layout, Packed, Row, Side

_RESERVED = "lengths"


class Batch(Layout):
    """B sequences with columns of three kinds: one entry per token, one per sequence, and Python objects.

    Treat a batch as immutable: every method returns a new batch, which may share memory with this one. A batch from
    another process may be in read-only memory; `writable()` copies it. All tensors are on one device.
    """

    __iter__ = None  # iteration would be ambiguous: over columns or over sequences
    _host: Self | None = None

    def __init__(
        self,
        lengths: Tensor | Sequence[int],
        per_token: Mapping[str, Tensor] | None = None,
        per_sequence: Mapping[str, Tensor] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Check that the sizes of all columns agree.

        Args:
            lengths: [B] number of tokens in each sequence. Zeros are allowed.
            per_token: tensors of shape [N], with N the sum of lengths.
            per_sequence: tensors of shape [B, ...].
            objects: lists of B Python objects. They must be picklable if the batch is sent to another process.

        Raises:
            ValueError: a column has the wrong size, device or kind, or its name occurs twice.
        """
        per_token = per_token or {}
        per_sequence = per_sequence or {}
        objects = objects or {}
        if not isinstance(lengths, Tensor):
            columns = chain(per_token.values(), per_sequence.values())
            device = next((x.device for x in columns if isinstance(x, Tensor)), None)
            lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
        super().__init__(lengths)
        self._check(per_token, per_sequence, objects)
        self._fill(per_token, per_sequence, objects)

    def _fill(
        self, per_token: Mapping[str, Tensor], per_sequence: Mapping[str, Tensor], objects: Mapping[str, Sequence[Any]]
    ) -> None:
        self.per_token: Mapping[str, Tensor] = MappingProxyType({**per_token})
        """The per-token columns, each [N]."""
        self.per_sequence: Mapping[str, Tensor] = MappingProxyType({**per_sequence})
        """The per-sequence columns, each [B, ...]."""
        lists = {name: list(column) for name, column in objects.items()}
        self.objects: Mapping[str, list[Any]] = MappingProxyType(lists)
        """The columns of Python objects, each of length B."""

    def _check(
        self, per_token: Mapping[str, Tensor], per_sequence: Mapping[str, Tensor], objects: Mapping[str, Sequence[Any]]
    ) -> None:
        seen: set[str] = set()
        for name in chain(per_token, per_sequence, objects):
            if name == _RESERVED:
                raise ValueError(f"column name {name!r} is reserved for the lengths of the batch; choose another name")
            if name in seen:
                raise ValueError(f"column {name!r} exists twice, in columns of different kinds; drop or rename one")
            seen.add(name)
        for name, x_N in per_token.items():
            self._check_tensor(name, x_N, "per-token", self.num_tokens)
            if x_N.dim() != 1:
                raise ValueError(f"per-token column {name!r} has shape {list(x_N.shape)}; it must be [N]")
        for name, x_B in per_sequence.items():
            self._check_tensor(name, x_B, "per-sequence", len(self))
        for name, column in objects.items():
            if len(column) != len(self):
                raise ValueError(f"object column {name!r} has {len(column)} items for {len(self)} sequences")

    def _check_tensor(self, name: str, x: Any, kind: str, size: int) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"{kind} column {name!r} is a {type(x).__name__}; make it a tensor with torch.as_tensor")
        if x.dim() == 0 or x.shape[0] != size:
            unit = kind.removeprefix("per-")
            raise ValueError(f"{kind} column {name!r} has shape {list(x.shape)}, but the batch has {size} {unit}s")
        if x.device != self.lengths.device:
            raise ValueError(f"{kind} column {name!r} is on {x.device}, the batch on {self.lengths.device}; use .to()")

    @classmethod
    def from_rows(
        cls,
        per_token: Mapping[str, Sequence[Row]],
        per_sequence: Mapping[str, Tensor | Sequence[Any]] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
    ) -> Self:
        """Build a batch from ragged rows. Integers become int64, floats become float32, tensors keep their dtype.

        Raises:
            ValueError: there is no per-token column, or two of them differ in the length of a row.
        """
        lengths: list[int] = []
        first = ""
        for name, rows in per_token.items():
            row_lengths = [len(row) for row in rows]
            if not first:
                first = name
                lengths = row_lengths
            if len(row_lengths) != len(lengths):
                raise ValueError(f"column {name!r} has {len(row_lengths)} rows, but {first!r} has {len(lengths)}")
            for i, (length, expected) in enumerate(zip(row_lengths, lengths, strict=True)):
                if length != expected:
                    raise ValueError(f"row {i} of {name!r} has {length} entries, but that of {first!r} has {expected}")
        if not first:
            raise ValueError("from_rows needs at least one per-token column, which defines the sequence lengths")
        return cls(
            lengths,
            {name: ragged.end_to_end(rows) for name, rows in per_token.items()},
            {name: torch.as_tensor(column) for name, column in (per_sequence or {}).items()},
            objects,
        )

    # --- access to columns --------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: str) -> Any: ...
    @overload
    def __getitem__(self, name: slice) -> Self: ...
    def __getitem__(self, name: str | slice) -> Any:
        """Return the column of this name. With a slice, return these sequences as `select` does."""
        if isinstance(name, slice):
            return self.select(name)
        for columns in (self.per_token, self.per_sequence, self.objects):
            if name in columns:
                return columns[name]
        raise self.no_column(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        tensors = chain(self.per_token.items(), self.per_sequence.items())
        columns = [f"{name} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors]
        return f"Batch({len(self)} sequences, {self.num_tokens} tokens: {', '.join([*columns, *self.objects])})"

    def no_column(self, name: str) -> KeyError:
        """Return the error for a column that the batch does not have."""
        return KeyError(f"no column {name!r}; the batch has {', '.join(self.names) or 'none'}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns: per-token, per-sequence, objects."""
        return (*self.per_token, *self.per_sequence, *self.objects)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors. Objects are not counted."""
        tensors = (self.lengths, *self.per_token.values(), *self.per_sequence.values())
        return sum(x.nelement() * x.element_size() for x in tensors)

    def row(self, i: int, name: str) -> Tensor:
        """Return sequence i's part of a per-token column, as a view. A negative i counts from the end."""
        if not -len(self) <= i < len(self):
            raise ValueError(f"index out of range: sequence {i} of a batch of {len(self)}")
        i %= len(self)
        return self._token_column(name)[int(self.offsets[i]) : int(self.offsets[i + 1])]

    def lists(self, name: str) -> list[list[Any]]:
        """Return every sequence's part of a per-token column as Python numbers."""
        return [part.tolist() for part in self._token_column(name).split(self.lengths.tolist())]

    def _token_column(self, name: str) -> Tensor:
        if name not in self.per_token:
            if name in self.names:
                names = ", ".join(self.per_token)
                raise ValueError(f"column {name!r} is not a per-token column; the per-token columns are {names}")
            raise self.no_column(name)
        return self.per_token[name]

    # --- change of columns --------------------------------------------------------------------------------------

    def with_tokens(self, **columns: Tensor) -> Self:
        """Return the batch with per-token columns [N] added or replaced."""
        return self._with_columns(per_token={**self.per_token, **columns})

    def with_sequences(self, **columns: Tensor) -> Self:
        """Return the batch with per-sequence columns [B, ...] added or replaced."""
        return self._with_columns(per_sequence={**self.per_sequence, **columns})

    def with_objects(self, **columns: Sequence[Any]) -> Self:
        """Return the batch with columns of B objects added or replaced."""
        return self._with_columns(objects={**self.objects, **columns})

    def without(self, *names: str) -> Self:
        """Return the batch without these columns."""
        return self._filtered(names, keep=False)

    def only(self, *names: str) -> Self:
        """Return the batch with only these columns. The lengths always stay."""
        return self._filtered(names, keep=True)

    def _filtered(self, names: Sequence[str], keep: bool) -> Self:
        for name in names:
            if name not in self:
                raise self.no_column(name)
        return self._with_columns(
            {name: x for name, x in self.per_token.items() if (name in names) == keep},
            {name: x for name, x in self.per_sequence.items() if (name in names) == keep},
            {name: x for name, x in self.objects.items() if (name in names) == keep},
        )

    def _with_columns(
        self,
        per_token: Mapping[str, Tensor] | None = None,
        per_sequence: Mapping[str, Tensor] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
    ) -> Self:
        """Return a batch with the same lengths and other columns; kinds that are None stay."""
        if per_token is None:
            per_token = self.per_token
        if per_sequence is None:
            per_sequence = self.per_sequence
        if objects is None:
            objects = self.objects
        self._check(per_token, per_sequence, objects)
        new = object.__new__(type(self))
        # Copies the cached offsets and sequence_ids too, so that they are not computed again.
        vars(new).update(vars(self), _host=None)
        new._fill(per_token, per_sequence, objects)
        return new

    def _unchecked(
        self,
        lengths: Tensor,
        num_tokens: int,
        per_token: Mapping[str, Tensor],
        per_sequence: Mapping[str, Tensor],
        objects: Mapping[str, list[Any]],
    ) -> Self:
        """Return a batch without a check, for columns whose sizes follow from those of this batch."""
        new = object.__new__(type(self))
        Layout.__init__(new, lengths, num_tokens)
        new._fill(per_token, per_sequence, objects)
        return new

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self._unchecked(
            change(self.lengths),
            self.num_tokens,
            {name: change(x_N) for name, x_N in self.per_token.items()},
            {name: change(x_B) for name, x_B in self.per_sequence.items()},
            self.objects,
        )

    def writable(self) -> Self:
        """Return a copy whose tensors may be written into."""
        return self._map_tensors(torch.clone)

    def to(self, device: torch.device | str) -> Self:
        """Return the batch with all tensors on a device. The host does not wait for a copy to a GPU."""
        copied = self._map_tensors(lambda x: ragged.sent(x, device))
        copied._host = self if self.lengths.device.type == "cpu" else None
        return copied

    @property
    def host(self) -> Self:
        """The same batch on the CPU. It is kept by `to`, so that layouts can be computed without reading the device."""
        if self.lengths.device.type == "cpu":
            return self
        return self.to("cpu") if self._host is None else self._host

    # --- selection of sequences ---------------------------------------------------------------------------------

    def select(self, index: Tensor | Sequence[int] | slice) -> Self:
        """Return the sequences at these positions, in this order.

        A slice of step 1 returns a view, everything else a copy.

        Args:
            index: positions, which may repeat or be negative; a bool mask [B]; or a slice.

        Raises:
            ValueError: the index has another shape or dtype, or a position is out of range.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                stop = max(start, stop)
                return self.parts([start, stop - start, len(self) - stop])[1]
            index = range(start, stop, step)
        index_B = self._positions(index)
        index_N = self.token_index(index_B)
        positions = []
        if self.objects:  # a device-to-host copy, which a batch without objects avoids
            positions = index_B.tolist()
        return self._unchecked(
            self.lengths[index_B],
            len(index_N),
            {name: x_N.index_select(0, index_N) for name, x_N in self.per_token.items()},
            {name: x_B.index_select(0, index_B) for name, x_B in self.per_sequence.items()},
            {name: [column[i] for i in positions] for name, column in self.objects.items()},
        )

    def _positions(self, index: Tensor | Sequence[int]) -> Tensor:
        """Return int64 positions from 0 to B - 1 for any index but a slice."""
        index = torch.as_tensor(index, device=self.lengths.device)
        if index.dim() != 1:
            raise ValueError(f"select needs a list of positions, but the index has shape {list(index.shape)}")
        if index.dtype == torch.bool:
            if len(index) != len(self):
                raise ValueError(f"a bool index of {len(index)} entries for {len(self)} sequences")
            return index.nonzero().squeeze(1)
        # torch makes a float tensor of an empty list.
        if index.is_floating_point() and len(index):
            raise ValueError(f"select needs integer positions, but the index is {index.dtype}")
        index = index.to(torch.int64)
        outside = (index < -len(self)) | (index >= len(self))
        if bool(outside.any()):
            raise ValueError(f"select of sequence {int(index[outside][0])} from a batch of {len(self)}")
        return torch.where(index < 0, index + len(self), index)

    def parts(self, sizes: list[int]) -> list[Self]:
        """Split into contiguous views with the given numbers of sequences, which must sum to B."""
        bounds = [0, *accumulate(sizes)]
        tokens = self.offsets[torch.tensor(bounds, device=self.offsets.device)].diff().tolist()
        lengths = self.lengths.split(sizes)
        per_token = {name: x_N.split(tokens) for name, x_N in self.per_token.items()}
        per_sequence = {name: x_B.split(sizes) for name, x_B in self.per_sequence.items()}
        return [
            self._unchecked(
                lengths[i],
                tokens[i],
                {name: parts[i] for name, parts in per_token.items()},
                {name: parts[i] for name, parts in per_sequence.items()},
                {name: column[bounds[i] : bounds[i + 1]] for name, column in self.objects.items()},
            )
            for i in range(len(sizes))
        ]

    def split(self, n: int) -> list[Self]:
        """Split into n contiguous views whose numbers of sequences differ by at most one, the larger ones first."""
        ragged.check_positive("split into", n)
        base, extra = divmod(len(self), n)
        return self.parts([base + (i < extra) for i in range(n)])

    @classmethod
    def concat(cls, batches: Iterable["Batch"]) -> Self:
        """Concatenate batches.

        A per-sequence column `log_...`, which holds numbers to log, may be missing in some batches. It is NaN there.

        Raises:
            ValueError: there is no batch, another column is missing in one of them, or a column differs in kind, dtype
                or shape.
        """
        parts = list(batches)
        if not parts:
            raise ValueError("concat needs at least one batch, because an empty list has no columns")
        # Environments log different numbers, so batches of different tasks differ in these columns.
        logged = {name for part in parts for name in part.per_sequence if name.startswith("log_")}
        for i, part in enumerate(parts):
            if missing := logged - part.per_sequence.keys():
                parts[i] = part.with_sequences(**{name: torch.full((len(part),), torch.nan) for name in missing})
        for i, part in enumerate(parts):
            for kind in ("per_token", "per_sequence", "objects"):
                odd = set(getattr(parts[0], kind)) ^ set(getattr(part, kind))
                if odd:
                    raise ValueError(f"batches 0 and {i} of concat: only one has the {kind} columns {sorted(odd)}")
        first = parts[0]
        return cls(
            torch.cat([part.lengths for part in parts]),
            {name: ragged.joined([part.per_token[name] for part in parts], name) for name in first.per_token},
            {name: ragged.joined([part.per_sequence[name] for part in parts], name) for name in first.per_sequence},
            {name: list(chain.from_iterable(part.objects[name] for part in parts)) for name in first.objects},
        )

    def repeat(self, n: int) -> Self:
        """Return each sequence n times, with its copies adjacent."""
        ragged.check_positive("repeat", n)
        return self.select(torch.arange(len(self), device=self.lengths.device).repeat_interleave(n))

    def __shard__(self, n: int) -> list[Self]:
        """Split the batch for a call that is split over n workers."""
        return self.split(n)

    @classmethod
    def __unshard__(cls, parts: Iterable["Batch"]) -> Self:
        """Concatenate the batches that the workers returned."""
        return cls.concat(parts)

    # --- per-sequence sums, padding -----------------------------------------------------------------------------

    def sum_tokens(self, x_N: Tensor) -> Tensor:
        """Return the sum [B] of a per-token tensor over each sequence, 0 for an empty one. Bools are counted."""
        if x_N.shape != (self.num_tokens,):
            raise ValueError(f"sum_tokens of shape {list(x_N.shape)} in a batch of {self.num_tokens} tokens")
        if x_N.dtype == torch.bool:
            x_N = x_N.to(torch.int64)
        zero_B = torch.zeros(len(self), dtype=x_N.dtype, device=x_N.device)
        return zero_B.index_add(0, self.sequence_ids, x_N)

    def padded(self, name: str, value: float, side: Side = "right") -> Tensor:
        """Return a per-token column [B, T], with shorter sequences padded by `value` on this side."""
        x_N = self._token_column(name)
        mask_BT = self.padding_mask(side)
        out_BT = torch.full(mask_BT.shape, value, dtype=x_N.dtype, device=x_N.device)
        out_BT[mask_BT] = x_N
        return out_BT

    def padding_mask(self, side: Side = "right") -> Tensor:
        """Return a mask [B, T], True where `padded` holds a token and False where it holds padding."""
        return ragged.token_mask(self.lengths, ragged.longest(self.lengths), side)

    @staticmethod
    def unpad(padded_BT: Tensor, lengths: Tensor, side: Side = "right") -> Tensor:
        """Return the per-token column [N] of a padded tensor. T may be larger than the longest sequence.

        Raises:
            ValueError: the tensor has too few rows or columns for these lengths.
        """
        rows, width = padded_BT.shape
        longest = ragged.longest(lengths)
        if rows != len(lengths) or width < longest:
            raise ValueError(f"unpad of {[rows, width]}, but {len(lengths)} sequences of at most {longest} tokens")
        return padded_BT[ragged.token_mask(lengths.to(padded_BT.device), width, side)]

    def packed(self, name: str = "tokens") -> Packed:
        """Return a per-token column in the format of variable-length attention kernels, without a copy.

        Raises:
            ValueError: there is no such per-token column, or it has more tokens than int32 can count.
        """
        tokens_N = self._token_column(name)
        if self.num_tokens > torch.iinfo(torch.int32).max:
            raise ValueError(f"{self.num_tokens} tokens are too many to pack: kernels count in int32; split the batch")
        return Packed(tokens_N, self.positions(), self.offsets.to(torch.int32), ragged.longest(self.lengths))

    # --- micro-batches and ranks --------------------------------------------------------------------------------

    def micro_batch_indices(self, max_tokens: int, max_sequences: int = 0, packing: bool = False) -> list[Tensor]:
        """Return positions [number of sequences] for each micro-batch. Each sequence is in exactly one micro-batch.

        Sequences are sorted by length to reduce padding. A sequence longer than the budget is a micro-batch of its own.

        Args:
            max_tokens: maximum number of rows times the longest row. With `packing`, maximum sum of the lengths.
            max_sequences: maximum number of rows; 0 for no limit.
            packing: count tokens without padding.

        Raises:
            ValueError: max_tokens is below 1, or max_sequences below 0.
        """
        return ragged.micro_batch_indices(self.lengths, max_tokens, max_sequences, packing)

    def balanced_shares(self, n: int, attention: float = 0.0) -> list[Tensor]:
        """Return positions for each of n ranks with about equal costs.

        The numbers of sequences of two ranks differ by at most one. A sequence of L tokens costs L + attention * L^2.
        The most expensive remaining sequence is assigned to the rank with the lowest cost that has room. The result is
        deterministic. Sequences of a rank keep their order.

        Args:
            n: number of ranks.
            attention: cost of attention per pair of tokens, relative to the other cost per token, at least 0. With 0
                the cost is the number of tokens. verl uses 1 / 24576 for a 7B model (6 * hidden size, which is 4096).
        """
        return ragged.balanced_shares(self.lengths, n, attention)

    # --- pickling, files ----------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as numpy arrays: Ray transfers them without a copy, and a view pickles only its own bytes."""
        columns = (
            {name: batch_io.to_numpy(x) for name, x in {_RESERVED: self.lengths, **self.per_token}.items()},
            {name: batch_io.to_numpy(x) for name, x in self.per_sequence.items()},
            dict(self.objects),
        )
        return _rebuild, (type(self), *columns)

    def to_table(self) -> Any:
        """Return a pyarrow table with one row per sequence: per-token columns as lists, and `lengths`.

        A column of objects keeps its values if all are of one simple type (or None). Lists, dicts and columns of mixed
        types become JSON text.

        Raises:
            ValueError: an object cannot be restored exactly (a tuple, a custom class), or Arrow does not support the
                dtype of a column.
        """
        return batch_io.to_table(self.lengths, self.offsets, self.per_token, self.per_sequence, self.objects)

    def save(self, path: str | Path) -> None:
        """Write a Parquet file with one row per sequence, in the format of `to_table`.

        Data frame libraries can read it. The file is written under a temporary name in the same folder, and renamed
        when it is complete. Missing folders are created.

        Raises:
            ValueError: as `to_table` does.
        """
        batch_io.write(self.to_table(), Path(path))


def _rebuild(
    cls: type[Batch],
    per_token: Mapping[str, tuple[np.ndarray, str]],
    per_sequence: Mapping[str, tuple[np.ndarray, str]],
    objects: Mapping[str, list[Any]],
) -> Batch:
    tokens = {name: batch_io.from_numpy(*packed) for name, packed in per_token.items()}
    sequences = {name: batch_io.from_numpy(*packed) for name, packed in per_sequence.items()}
    return cls(tokens.pop(_RESERVED), tokens, sequences, objects)

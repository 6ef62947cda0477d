"""Batch: sequences of different lengths, laid end to end without padding.

B sequences; N all tokens of a batch end to end; T tokens of the longest sequence (only where something is padded).

Per-token columns have the length of `tokens`, and entry t speaks about token t: its log-probability given the tokens
before it, the value of the state before it, its advantage. There is no shift to remember. `action_mask` is True where
the policy produced the token.
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

    Treat a batch as immutable: every method returns a new one, which may share memory with the old one. A batch that
    came from another process may lie in read-only memory; `writable()` copies it. All tensors are on one device.
    """

    __iter__ = None  # it would be ambiguous: columns or sequences?

    def __init__(
        self,
        lengths: Tensor | Sequence[int],
        per_token: Mapping[str, Tensor] | None = None,
        per_sequence: Mapping[str, Tensor] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Check that the sizes of all columns agree.

        Args:
            lengths: [B] tokens in each sequence; zeros are allowed.
            per_token: each [N], N = sum of lengths.
            per_sequence: each [B, ...].
            objects: each B Python objects, picklable if the batch is to cross a process.

        Raises:
            ValueError: a column has the wrong size, device or kind, or its name occurs twice.
        """
        per_token, per_sequence, objects = per_token or {}, per_sequence or {}, objects or {}
        if not isinstance(lengths, Tensor):
            columns = chain(per_token.values(), per_sequence.values())
            device = next((x.device for x in columns if isinstance(x, Tensor)), None)
            lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
        super().__init__(lengths)
        self._check(per_token, per_sequence, objects)
        self._fill(per_token, per_sequence, objects)

    def _fill(
        self,
        per_token: Mapping[str, Tensor],
        per_sequence: Mapping[str, Tensor],
        objects: Mapping[str, Sequence[Any]],
    ) -> None:
        self.per_token: Mapping[str, Tensor] = MappingProxyType({**per_token})
        """The per-token columns, each [N]."""
        self.per_sequence: Mapping[str, Tensor] = MappingProxyType({**per_sequence})
        """The per-sequence columns, each [B, ...]."""
        lists = {name: list(column) for name, column in objects.items()}
        self.objects: Mapping[str, list[Any]] = MappingProxyType(lists)
        """The columns of Python objects, each of length B."""

    def _check(
        self,
        per_token: Mapping[str, Tensor],
        per_sequence: Mapping[str, Tensor],
        objects: Mapping[str, Sequence[Any]],
    ) -> None:
        seen = {_RESERVED}
        for name in chain(per_token, per_sequence, objects):
            if name in seen:
                raise ValueError(
                    f"column {name!r} is the batch's own lengths; choose another name"
                    if name == _RESERVED
                    else f"column {name!r} is there twice, as columns of different kinds; drop or rename one"
                )
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
            unit = "tokens" if kind == "per-token" else "sequences"
            raise ValueError(f"{kind} column {name!r} has shape {list(x.shape)}, but the batch has {size} {unit}")
        if x.device != self.lengths.device:
            raise ValueError(
                f"{kind} column {name!r} is on {x.device}, the batch on {self.lengths.device}; move one with .to()"
            )

    @classmethod
    def from_rows(
        cls,
        per_token: Mapping[str, Sequence[Row]],
        per_sequence: Mapping[str, Tensor | Sequence[Any]] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
    ) -> Self:
        """Build a batch from ragged rows; integers become int64, floats float32, tensors keep their dtype.

        Raises:
            ValueError: there is no per-token column, or two of them differ in the length of a row.
        """
        lengths: list[int] = []
        first = ""
        for name, rows in per_token.items():
            found = [len(row) for row in rows]
            if not first:
                first, lengths = name, found
            if len(found) != len(lengths):
                raise ValueError(f"column {name!r} has {len(found)} rows, but {first!r} has {len(lengths)}")
            if found != lengths:
                i = next(i for i, (a, b) in enumerate(zip(found, lengths, strict=True)) if a != b)
                raise ValueError(f"row {i} of {name!r} has {found[i]} entries, but that of {first!r} has {lengths[i]}")
        if not first:
            raise ValueError("from_rows needs at least one per-token column, which has the lengths of the sequences")
        return cls(
            lengths,
            {name: ragged.end_to_end(rows) for name, rows in per_token.items()},
            {name: torch.as_tensor(column) for name, column in (per_sequence or {}).items()},
            objects,
        )

    # --- what is in it ------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: str) -> Any: ...
    @overload
    def __getitem__(self, name: slice) -> Self: ...
    def __getitem__(self, name: str | slice) -> Any:
        """The column of this name; of a slice the sequences, as `select` gives them."""
        if isinstance(name, slice):
            return self.select(name)
        for columns in (self.per_token, self.per_sequence, self.objects):
            if name in columns:
                return columns[name]
        raise self._no_column(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        tensors = chain(self.per_token.items(), self.per_sequence.items())
        columns = [f"{name} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors]
        return f"Batch({len(self)} sequences, {self.num_tokens} tokens: {', '.join([*columns, *self.objects])})"

    def _no_column(self, name: str) -> KeyError:
        return KeyError(f"no column {name!r}; the batch has {', '.join(self.names) or 'none'}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns: per-token, per-sequence, objects."""
        return (*self.per_token, *self.per_sequence, *self.objects)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; objects are not counted."""
        tensors = (self.lengths, *self.per_token.values(), *self.per_sequence.values())
        return sum(x.nelement() * x.element_size() for x in tensors)

    def row(self, i: int, name: str) -> Tensor:
        """Sequence i's part of a per-token column, a view; i may be negative."""
        if not -len(self) <= i < len(self):
            raise ValueError(f"sequence {i} of a batch of {len(self)}")
        i %= len(self)
        return self._token_column(name)[int(self.offsets[i]) : int(self.offsets[i + 1])]

    def lists(self, name: str) -> list[list[Any]]:
        """Every sequence's part of a per-token column, as Python numbers."""
        return [part.tolist() for part in self._token_column(name).split(self.lengths.tolist())]

    def _token_column(self, name: str) -> Tensor:
        if name not in self.per_token:
            if name in self.names:
                raise ValueError(f"column {name!r} is no per-token column; those are {', '.join(self.per_token)}")
            raise self._no_column(name)
        return self.per_token[name]

    # --- other columns ------------------------------------------------------------------------------------------

    def with_tokens(self, **columns: Tensor) -> Self:
        """The batch with per-token columns [N] added or replaced."""
        return self._with(per_token={**self.per_token, **columns})

    def with_sequences(self, **columns: Tensor) -> Self:
        """The batch with per-sequence columns [B, ...] added or replaced."""
        return self._with(per_sequence={**self.per_sequence, **columns})

    def with_objects(self, **columns: Sequence[Any]) -> Self:
        """The batch with columns of B objects added or replaced."""
        return self._with(objects={**self.objects, **columns})

    def without(self, *names: str) -> Self:
        """The batch without these columns."""
        return self._filtered(names, keep=False)

    def only(self, *names: str) -> Self:
        """The batch with these columns and no others; the lengths always stay."""
        return self._filtered(names, keep=True)

    def _filtered(self, names: Sequence[str], keep: bool) -> Self:
        for name in names:
            if name not in self:
                raise self._no_column(name)
        return self._with(
            {name: x for name, x in self.per_token.items() if (name in names) == keep},
            {name: x for name, x in self.per_sequence.items() if (name in names) == keep},
            {name: x for name, x in self.objects.items() if (name in names) == keep},
        )

    def _with(
        self,
        per_token: Mapping[str, Tensor] | None = None,
        per_sequence: Mapping[str, Tensor] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
    ) -> Self:
        """Other columns over the same lengths, whose offsets need not be worked out again."""
        per_token = self.per_token if per_token is None else per_token
        per_sequence = self.per_sequence if per_sequence is None else per_sequence
        objects = self.objects if objects is None else objects
        self._check(per_token, per_sequence, objects)
        new = object.__new__(type(self))
        vars(new).update(vars(self))
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
        """A batch of columns whose sizes follow from those of this one."""
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
        """A copy whose tensors may be written into."""
        return self._map_tensors(torch.clone)

    def to(self, device: torch.device | str) -> Self:
        """The batch with all tensors on a device."""
        return self._map_tensors(lambda x: x.to(device))

    # --- other sequences ----------------------------------------------------------------------------------------

    def select(self, index: Tensor | Sequence[int] | slice) -> Self:
        """The sequences at these positions, in this order; positions may repeat, be negative, or be a bool [B].

        A slice of step 1 is a view, everything else a copy.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                stop = max(start, stop)
                return self._parts([start, stop - start, len(self) - stop])[1]
            index = range(start, stop, step)
        index_B = self._positions(index)
        index_N = self.token_index(index_B)
        chosen = index_B.tolist() if self.objects else []
        return self._unchecked(
            self.lengths[index_B],
            len(index_N),
            {name: x_N.index_select(0, index_N) for name, x_N in self.per_token.items()},
            {name: x_B.index_select(0, index_B) for name, x_B in self.per_sequence.items()},
            {name: [column[i] for i in chosen] for name, column in self.objects.items()},
        )

    def _positions(self, index: Tensor | Sequence[int]) -> Tensor:
        """[number chosen] int64 positions between 0 and B."""
        given = torch.as_tensor(index, device=self.lengths.device)
        if given.dim() != 1:
            raise ValueError(f"select needs a list of positions, but the index has shape {list(given.shape)}")
        if given.dtype == torch.bool:
            if len(given) != len(self):
                raise ValueError(f"a bool index of {len(given)} entries for {len(self)} sequences")
            return given.nonzero().squeeze(1)
        if given.is_floating_point() and len(given):
            raise ValueError(f"select needs integer positions, but the index is {given.dtype}")
        given = given.to(torch.int64)
        outside = (given < -len(self)) | (given >= len(self))
        if bool(outside.any()):
            raise ValueError(f"select of sequence {int(given[outside][0])} from a batch of {len(self)}")
        return torch.where(given < 0, given + len(self), given)

    def _parts(self, sizes: list[int]) -> list[Self]:
        """Contiguous parts of so many sequences each, together all; they are views."""
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
        """Cut between neighbours into n chunks whose sizes differ by at most one, the larger ones first; views."""
        ragged.check_positive("split into", n)
        base, extra = divmod(len(self), n)
        return self._parts([base + (i < extra) for i in range(n)])

    @classmethod
    def concat(cls, batches: Iterable["Batch"]) -> Self:
        """The sequences of all batches, one batch after the other. A per-sequence column `log_...`, of numbers to log,
        may be missing in some, and is NaN there.

        Raises:
            ValueError: there is no batch, or another column is missing in one of them, or one differs in kind, dtype or
                shape.
        """
        parts = list(batches)
        if not parts:
            raise ValueError("concat needs at least one batch, because an empty list has no columns")
        logged = {name for part in parts for name in part.per_sequence if name.startswith("log_")}
        for i, part in enumerate(parts):
            if missing := logged - part.per_sequence.keys():
                parts[i] = part.with_sequences(**{name: torch.full((len(part),), torch.nan) for name in missing})
        for i, part in enumerate(parts):
            for kind in ("per_token", "per_sequence", "objects"):
                odd = set(getattr(parts[0], kind)) ^ set(getattr(part, kind))
                if odd:
                    raise ValueError(
                        f"batches 0 and {i} of concat differ in their {kind} columns: only one has {sorted(odd)}"
                    )
        first = parts[0]
        return cls(
            torch.cat([part.lengths for part in parts]),
            {name: ragged.joined([part.per_token[name] for part in parts], name) for name in first.per_token},
            {name: ragged.joined([part.per_sequence[name] for part in parts], name) for name in first.per_sequence},
            {name: list(chain.from_iterable(part.objects[name] for part in parts)) for name in first.objects},
        )

    def repeat(self, n: int) -> Self:
        """Each sequence n times, its copies adjacent."""
        ragged.check_positive("repeat", n)
        return self.select(torch.arange(len(self), device=self.lengths.device).repeat_interleave(n))

    def group_by(self, name: str) -> dict[Any, Self]:
        """The sequences of each value of a column, such as the responses to each prompt.

        Args:
            name: of a per-sequence column of integers [B], or of a column of objects that can be keys of a dict.

        Returns:
            The values, integers as Python's own, in the order in which each occurs first, each with its sequences in
            the order they have here. All are views of one copy, but each is a batch to build, which takes 10 to 30 us:
            seconds for 200,000 groups.

        Raises:
            ValueError: the column is of another kind, or an object is no key.
        """
        groups: dict[Any, list[int]] = {}
        for i, key in enumerate(self._keys(name)):
            try:
                groups.setdefault(key, []).append(i)
            except TypeError as error:
                raise ValueError(f"group_by {name!r}: sequence {i} has a {type(key).__name__}; make it text") from error
        order = list(chain.from_iterable(groups.values()))
        return dict(zip(groups, self.select(order)._parts([len(group) for group in groups.values()]), strict=True))

    def _keys(self, name: str) -> list[Any]:
        if name in self.objects:
            return self.objects[name]
        if name not in self:
            raise self._no_column(name)
        x = self[name]
        if name in self.per_token or x.dim() != 1 or not ragged.holds_integers(x):
            kind = "per-token" if name in self.per_token else "per-sequence"
            raise ValueError(
                f"group_by {name!r}, a {kind} column of {x.dtype} {list(x.shape)}; name a per-sequence one of integers "
                "[B], or one of objects"
            )
        return x.tolist()

    def __shard__(self, n: int) -> list[Self]:
        """How a call that is split over n workers cuts a batch."""
        return self.split(n)

    @classmethod
    def __unshard__(cls, parts: Iterable["Batch"]) -> Self:
        """How the workers' responses become one batch again."""
        return cls.concat(parts)

    # --- per-sequence sums, padding -----------------------------------------------------------------------------

    def sum_tokens(self, x_N: Tensor) -> Tensor:
        """[B] sum of a per-token tensor over each sequence; 0 for an empty one. Bools are counted."""
        if x_N.shape != (self.num_tokens,):
            raise ValueError(f"sum_tokens of shape {list(x_N.shape)} in a batch of {self.num_tokens} tokens")
        x_N = x_N.to(torch.int64) if x_N.dtype == torch.bool else x_N
        zero_B = torch.zeros(len(self), dtype=x_N.dtype, device=x_N.device)
        return zero_B.index_add(0, self.sequence_ids, x_N)

    def padded(self, name: str, value: float, side: Side = "right") -> Tensor:
        """[B, T] a per-token column as a rectangle, with `value` on the given side of the shorter sequences."""
        x_N = self._token_column(name)
        mask_BT = self.padding_mask(side)
        out_BT = torch.full(mask_BT.shape, value, dtype=x_N.dtype, device=x_N.device)
        out_BT[mask_BT] = x_N
        return out_BT

    def padding_mask(self, side: Side = "right") -> Tensor:
        """[B, T] bool, True where `padded` holds a token and False where it holds padding."""
        return ragged.token_mask(self.lengths, ragged.longest(self.lengths), side)

    @staticmethod
    def unpad(padded_BT: Tensor, lengths: Tensor, side: Side = "right") -> Tensor:
        """[N] what `padded` was made from; T may be larger than the longest sequence.

        Raises:
            ValueError: the rectangle has too few rows or columns for these lengths.
        """
        rows, width = padded_BT.shape
        longest = ragged.longest(lengths)
        if rows != len(lengths) or width < longest:
            raise ValueError(
                f"unpad of shape {[rows, width]} for {len(lengths)} sequences, the longest of {longest} tokens"
            )
        return padded_BT[ragged.token_mask(lengths.to(padded_BT.device), width, side)]

    def packed(self, name: str = "tokens") -> Packed:
        """A per-token column as attention kernels for sequences of different lengths take it; without a copy.

        Raises:
            ValueError: there is no such per-token column, or it has more tokens than int32 can count.
        """
        tokens_N = self._token_column(name)
        if self.num_tokens > torch.iinfo(torch.int32).max:
            raise ValueError(
                f"{self.num_tokens} tokens are too many to pack, as kernels count in int32; split the batch"
            )
        return Packed(tokens_N, self.positions(), self.offsets.to(torch.int32), ragged.longest(self.lengths))

    # --- sharing the work ---------------------------------------------------------------------------------------

    def micro_batch_indices(self, max_tokens: int, max_sequences: int = 0, packing: bool = False) -> list[Tensor]:
        """Positions for micro-batches that fit a budget when padded; together they are every sequence once.

        Sequences are sorted by length, so that little is padded, and cut so that rows times the longest row is at
        most `max_tokens`, and rows at most `max_sequences` (0: no limit). With `packing`, which pads nothing, the sum
        of the lengths is at most `max_tokens`. A sequence longer than the budget stands alone.
        """
        return ragged.micro_batch_indices(self.lengths, max_tokens, max_sequences, packing)

    def balanced_shares(self, n: int, attention: float = 0.0) -> list[Tensor]:
        """Positions for n ranks, such that each costs about the same and has, to within one, as many sequences.

        A sequence of L tokens costs L + attention * L^2. The most expensive one left goes to the rank with the lowest
        cost that still has space. The same batch gives the same shares everywhere; within a share sequences keep their
        order.

        Args:
            n: how many shares.
            attention: how much of a token's own cost each token of the sequence adds to it, at least 0. With 0 tokens
                are counted. 1 / 24576 is what verl takes for a model of 7B (6 * hidden size, which is 4096).
        """
        return ragged.balanced_shares(self.lengths, n, attention)

    # --- crossing processes, files ------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as numpy arrays: they cross Ray without a copy, and a chunk takes only its own bytes along."""
        columns = (
            {name: batch_io.to_numpy(x) for name, x in {_RESERVED: self.lengths, **self.per_token}.items()},
            {name: batch_io.to_numpy(x) for name, x in self.per_sequence.items()},
            dict(self.objects),
        )
        return _rebuild, (type(self), *columns)

    def to_table(self) -> Any:
        """A pyarrow table with one row per sequence: per-token columns as lists, and `lengths`.

        Objects are what they are where all are of one simple kind (or None), and else JSON text: lists, dicts, and
        columns of mixed kinds.

        Raises:
            ValueError: an object would not come back as it is (a tuple, a class of your own), or Arrow does not know
                the dtype of a column.
        """
        return batch_io.to_table(self.lengths, self.offsets, self.per_token, self.per_sequence, self.objects)

    @classmethod
    def from_table(cls, table: Any) -> Self:
        """The batch that `to_table` wrote, also after a way through Parquet; tensors may be read-only.

        Raises:
            ValueError: the table was not written by `to_table`.
        """
        lengths_B, columns = batch_io.from_table(table)
        return cls(lengths_B, **columns)

    def save(self, path: str | Path) -> None:
        """Write a Parquet file with one row per sequence, as `to_table` has them; data frames read it.

        It is written beside its place and moved there when it is whole. Folders that are missing are made.

        Raises:
            ValueError: as `to_table` does.
        """
        batch_io.write(self.to_table(), Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The batch that `save` wrote, exactly; on the CPU, and its tensors may be read-only.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it was not written by `save`, or is not whole.
        """
        try:
            return cls.from_table(batch_io.read(Path(path)))
        except ValueError as error:
            raise ValueError(f"{path} holds no batch: {error}") from error


def _rebuild(
    cls: type[Batch],
    per_token: Mapping[str, tuple[np.ndarray, str]],
    per_sequence: Mapping[str, tuple[np.ndarray, str]],
    objects: Mapping[str, list[Any]],
) -> Batch:
    tokens = {name: batch_io.from_numpy(*packed) for name, packed in per_token.items()}
    sequences = {name: batch_io.from_numpy(*packed) for name, packed in per_sequence.items()}
    return cls(tokens.pop(_RESERVED), tokens, sequences, objects)
